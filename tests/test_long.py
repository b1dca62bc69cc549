"""Kernels of many parameters, whose vectors stay apart by site."""

import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_mhbt import MHBT, RSGLD, SGLD
from numpyro_mhbt.vectors import Blocks

SHAPES = {"a": (101, 100), "b": (999,), "c": (2, 30)}
SIZE = sum(int(np.prod(shape)) for shape in SHAPES.values())
Y = jnp.arange(10.0)


def model(y, scale=0.0):
    """The prior, since rows say little or nothing."""
    sites = [
        numpyro.sample(name, dist.Normal(0, 1).expand(shape).to_event())
        for name, shape in SHAPES.items()
    ]
    total = sum(jnp.sum(site) for site in sites)
    with numpyro.plate("N", len(y), subsample_size=5) as rows:
        numpyro.factor("y", scale * total * y[rows])


def prior_draw(key):
    keys = random.split(key, len(SHAPES))
    return {
        name: random.normal(key, shape)
        for key, (name, shape) in zip(keys, SHAPES.items(), strict=True)
    }


def make_kernel(proposal, **options):
    return MHBT(
        model,
        proposal,
        temperature=1.0,
        control_variate=None,
        bias_correction=False,
        adapt_step_size=False,
        **{"adapt_mass_matrix": False} | options,
    )


@pytest.mark.filterwarnings("ignore:MHBT")
@pytest.mark.parametrize(
    "proposal",
    [
        SGLD(0.6, noise="tempered"),
        RSGLD(0.4, 1.01, forward_prob=0.8, noise="tempered"),
        RSGLD(0.02, 1.0005, forward_prob=0.8, noise="paper"),
    ],
    ids=str,
)
def test_draws_stay_those_of_the_prior(proposal):
    """Started from exact draws, chains must neither widen nor shrink."""
    kernel = make_kernel(proposal)
    keys = random.split(random.key(1), 4)
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=150,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = jax.vmap(prior_draw)(keys)
    mcmc.run(random.key(0), Y, init_params=start, extra_fields=("accept_prob",))
    assert isinstance(mcmc.last_state.z_grad, Blocks)
    assert 0.1 < np.mean(mcmc.get_extra_fields()["accept_prob"]) < 0.95
    for name, z in mcmc.get_samples(group_by_chain=True).items():
        last = np.asarray(z)[:, -1].ravel()
        error = np.sqrt(2 / last.size)
        assert abs(np.mean(last**2) - 1) < 4 * error, name
        assert abs(np.mean(last)) < 4 / np.sqrt(last.size), name
        assert np.all(np.asarray(z)[:, -1] != np.asarray(z)[:, 0]), name


@pytest.mark.parametrize("chain_method", ["sequential", "vectorized"])
@pytest.mark.filterwarnings("ignore:MHBT", "ignore:There are not enough devices")
def test_values_are_those_of_one_flat_vector(chain_method):
    by_site = make_kernel(SGLD(1e-3))
    flat = make_kernel(SGLD(1e-3), adapt_mass_matrix=True)
    mcmc = MCMC(
        by_site,
        num_warmup=2,
        num_samples=5,
        num_chains=2,
        chain_method=chain_method,
        progress_bar=False,
    )
    mcmc.run(random.key(0), Y, scale=0.1)
    mcmc = pickle.loads(pickle.dumps(mcmc))
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, Y, scale=0.1)
    state = jax.tree.map(lambda x: x[0], mcmc.last_state)
    other = flat.init(random.key(0), 0, None, (Y,), {"scale": 0.1})
    other = other._replace(z=state.z, batch=state.batch)
    other = flat.refresh(other, (Y,), {"scale": 0.1})
    assert other.z_grad.shape == (SIZE,)
    for name in ("log_density", "potential_energy", "noise_variance"):
        expected = pytest.approx(float(getattr(other, name)), rel=1e-5)
        assert float(getattr(state, name)) == expected, name
    sites = [state.z_grad.tree[name].ravel() for name in SHAPES]
    assert np.allclose(np.concatenate(sites), other.z_grad, rtol=1e-5)
