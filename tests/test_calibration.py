"""Simulation-based calibration of the posterior at T = 1, from mini-batches."""

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, trace
import pytest
from scipy import stats

from numpyro_mhbt import MHBT, SGLD, Taylor, full_data

ROWS, BATCH, DIM = 1000, 100, 3
X = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
WARMUP, DRAWS, THIN = 500, 99, 15


def linear(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([DIM]).to_event(1))
    sigma = numpyro.sample("sigma", dist.LogNormal(0, 0.5))
    with numpyro.plate("N", ROWS, subsample_size=BATCH) as rows:
        obs = None if y is None else y[rows]
        numpyro.sample("y", dist.Normal(x[rows] @ w, sigma), obs=obs)


def logistic(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([DIM]).to_event(1))
    with numpyro.plate("N", ROWS, subsample_size=BATCH) as rows:
        obs = None if y is None else y[rows]
        numpyro.sample("y", dist.Bernoulli(logits=x[rows] @ w), obs=obs)


def flatten(values):
    return jnp.concatenate([jnp.ravel(values[name]) for name in sorted(values)])


@pytest.mark.slow
@pytest.mark.long_chains
@pytest.mark.filterwarnings("ignore:MHBT")
@pytest.mark.parametrize("model", [linear, logistic])
def test_ranks_are_uniform(model):
    kernel = MHBT(model, SGLD(), control_variate=Taylor(order=2), temperature=1.0)
    x = jnp.asarray(X)

    @jax.jit
    def simulate(key):
        sites = trace(seed(full_data(model), key)).get_trace(x)
        truth = {name: sites[name]["value"] for name in ("w", "sigma") if name in sites}
        return flatten(truth), sites["y"]["value"].astype(jnp.float32)

    @jax.jit
    def sample(state, y):
        def some(state, length):
            return lax.scan(
                lambda s, _: (kernel.sample(s, (x, y), {}), None),
                state,
                None,
                length=length,
            )[0]

        def keep(state, _):
            state = some(state, THIN)
            return state, flatten(kernel.postprocess_fn((x, y), {})(state.z))

        return lax.scan(keep, some(state, WARMUP), None, length=DRAWS)[1]

    ranks = []
    for key in random.split(random.key(0), 400):
        key_data, key_chain = random.split(key)
        truth, y = simulate(key_data)
        state = kernel.init(key_chain, WARMUP, None, (x, y), {})
        ranks.append(np.sum(np.asarray(sample(state, y)) < np.asarray(truth), axis=0))
    # 100 ranks in ten bins; a rank of each coordinate is a test of its own.
    for coordinate in np.transpose(ranks):
        counts = np.bincount(coordinate // 10, minlength=10)
        assert stats.chisquare(counts).pvalue > 1e-3, counts
