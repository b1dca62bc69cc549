"""Warm-up settles on a working step size, whatever the noise."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_mhbt import MHBT, RSGLD, SGLD, RandomWalk, Taylor
from numpyro_mhbt.adaptation import acceptance_ceiling


def model(y, m):
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([3]).to_event(1))
    scale = jnp.array([1.0, 1.0, 30.0])  # so that the mass matrix matters
    with numpyro.plate("N", len(y), subsample_size=m) as rows:
        numpyro.sample("y", dist.Normal(mu, scale).to_event(1), obs=y[rows])


Y = jnp.array([1.0, 1.0, 30.0]) * random.normal(random.key(0), (2000, 3))


def run(kernel, m, num_chains=8):
    mcmc = MCMC(
        kernel,
        num_warmup=1000,
        num_samples=2000,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    fields = ("step_size", "accept_prob", "mean_noise_variance")
    mcmc.run(random.key(1), Y, m, extra_fields=fields)
    return mcmc, mcmc.get_extra_fields(group_by_chain=True)


@pytest.mark.filterwarnings("ignore:MHBT. . of 8 chain")  # on a lucky batch for long
@pytest.mark.parametrize(
    "proposal", [pytest.param(RandomWalk, marks=pytest.mark.slow), SGLD, RSGLD]
)
def test_step_size_does_not_collapse_in_loud_noise(proposal):
    """v is about 5: no move can be accepted more than 0.11 of the time."""
    proposal = proposal()
    kernel = MHBT(
        model, proposal, c_n=44.0, control_variate=None, bias_correction=False
    )
    mcmc, extra = run(kernel, 500)
    noise = np.median(extra["mean_noise_variance"])
    assert 3.5 < noise < 7
    ceiling = float(acceptance_ceiling(noise))
    accept = np.median(np.asarray(extra["accept_prob"]).mean(1))
    target = proposal.target_accept_prob * ceiling
    assert 0.3 * target < accept < 2.5 * target
    # In units of the mass matrix a good step is of order one or a tenth.
    assert np.median(extra["step_size"]) > 0.02
    spread = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"]).std(1)
    assert np.median(spread[:, 0]) > 0.5 / np.sqrt(44.0)


def test_mass_matrix_learns_the_scales():
    kernel = MHBT(model, RSGLD(noise="tempered"), c_n=20.0)
    mcmc, extra = run(kernel, 1000)
    weights = np.median(mcmc.last_state.adapt_state.mass_matrix_sqrt_inv, axis=0)
    assert weights[2] / weights[0] == pytest.approx(30, rel=0.5)
    assert np.mean(extra["accept_prob"]) == pytest.approx(0.45, abs=0.12)


def test_target_accept_prob_is_taken_literally():
    proposal = RSGLD(noise="tempered")
    kernel = MHBT(model, proposal, c_n=5.0, target_accept_prob=0.8)
    _, extra = run(kernel, 1000)
    assert np.mean(extra["accept_prob"]) == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize(
    "dense_mass", [pytest.param(False, marks=pytest.mark.slow), True]
)
def test_matched_moves_in_a_gaussian_are_all_but_independent(dense_mass):
    """The longest step is found and not exceeded, and leaves no correlation."""
    kernel = MHBT(model, SGLD(), control_variate=Taylor(2), dense_mass=dense_mass)
    mcmc, extra = run(kernel, 1000)
    step_size = np.asarray(extra["step_size"])
    assert np.all((step_size > 0.5) & (step_size <= 1))
    draws = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])
    assert effective_sample_size(draws).min() > 0.5 * draws.shape[0] * draws.shape[1]
    # Chains are independent of each other: a standard error by chain.
    exact = 1 / np.sqrt(2000) * np.array([1.0, 1.0, 30.0])
    ratio = draws.std(1) / exact
    error = ratio.std(0) / np.sqrt(len(ratio))
    assert np.all(np.abs(ratio.mean(0) - 1) < 4 * error + 2e-3)
