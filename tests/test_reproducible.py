"""The same seed gives the same draws, whatever is around the chain."""

from functools import cache

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest
from test_checkpoint import python
from test_contract import CHAINS, x64  # noqa: F401 (a fixture)

from numpyro_mhbt import MHBT

RNG = np.random.default_rng(0)
X = RNG.normal(size=(500, 3))
Y = (RNG.uniform(size=500) < 1 / (1 + np.exp(-X.sum(axis=1)))).astype(float)


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    scale = numpyro.sample("scale", dist.Uniform(0.5, 2))
    with numpyro.plate("N", len(x), subsample_size=50):
        xb, yb = numpyro.subsample(x, 1), numpyro.subsample(y, 0)
        numpyro.sample("y", dist.Bernoulli(logits=scale * (xb @ w)), obs=yb)


KERNELS = {steps: MHBT(model, c_n=30, steps_per_draw=steps) for steps in (1, 4)}


@cache
def run(steps=1, bar=False, dtype=np.float32, method="sequential", chains=1, thin=1):
    """Draws of the first chain, and what was decided in it."""
    mcmc = MCMC(
        KERNELS[steps],
        num_warmup=60,
        num_samples=60,
        thinning=thin,
        num_chains=chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.progress_bar = bar
    keys = random.split(random.key(5))
    data = jnp.asarray(X, dtype), jnp.asarray(Y, dtype)
    fields = ("accepted", "forward", "batch.N")
    mcmc.run(keys if chains == 2 else keys[0], *data, extra_fields=fields)
    found = {**mcmc.get_samples(True), **mcmc.get_extra_fields(True)}
    return {name: np.asarray(value[0]) for name, value in found.items()}


# Fused loops are where the same operations may be rounded in several ways.
@pytest.mark.long_chains
@pytest.mark.parametrize("steps", KERNELS)
@pytest.mark.parametrize("method, chains", [("sequential", 1), ("vectorized", 2)])
def test_progress_bar_changes_no_bit(steps, method, chains):
    with_bar, without = (
        run(steps, bar, method=method, chains=chains) for bar in (True, False)
    )
    assert np.ptp(without["scale"]) > 0
    for name, value in without.items():
        np.testing.assert_array_equal(with_bar[name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.long_chains
def test_thinning_keeps_some_of_the_same_draws():
    every, third = run(), run(thin=3)
    for name, value in every.items():
        np.testing.assert_array_equal(third[name], value[2::3], err_msg=name)


@pytest.mark.parametrize("method, chains", CHAINS[1:])
def test_chain_methods_draw_the_same_batches_and_decide_alike(x64, method, chains):  # noqa: F811
    one, other = run(dtype=float), run(dtype=float, method=method, chains=chains)
    assert 0 < one["accepted"].mean() < 1
    for name in ("accepted", "forward", "batch.N"):
        np.testing.assert_array_equal(other[name], one[name], err_msg=name)
    for name in ("w", "scale"):
        np.testing.assert_allclose(other[name], one[name], rtol=1e-9, atol=1e-9)


def test_two_processes_give_the_same_bits(tmp_path):
    """One of them with checkpoints."""
    files = [tmp_path / "one.npz", tmp_path / "other.npz"]
    processes = [python(files[0]), python(files[1], tmp_path / "run")]
    assert [process.wait() for process in processes] == [0, 0]
    one, other = (dict(np.load(file)) for file in files)
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(other[name], value, err_msg=name)
    assert jax.tree.all([np.ptp(one[name]) > 0 for name in ("mu", "sd")])
