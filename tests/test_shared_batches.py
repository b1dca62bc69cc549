"""Vectorised chains that propose with the same batches."""

from functools import partial

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
import pytest
from scipy import stats
from test_exact import FIXED, PLAIN, PROPOSALS, Exact, Y, model

from numpyro_mhbt import MHBT, RandomWalk

GROUPS, CHAINS, DRAWS = 200, 8, 300


def make_kernel(proposal, **options):
    options = {"share_batches": True} | PLAIN | FIXED | options
    return MHBT(model, PROPOSALS[proposal], c_n=6.0, **options)


@pytest.mark.parametrize(
    "proposal", [pytest.param("walk", marks=pytest.mark.slow), "beta1.5_coin0.5"]
)
def test_each_chain_is_exact(proposal):
    """Chains of a group err together, so that groups count, and not chains."""
    kernel, exact = make_kernel(proposal), Exact(6.0)
    keys = random.split(random.key(0), (GROUPS, CHAINS))
    u = random.uniform(random.key(1), (GROUPS, CHAINS))

    def start(keys, mu):
        return kernel.init(keys, 0, {"mu": mu}, (Y,), {})

    states = [start(*group) for group in zip(keys, exact.quantile(u), strict=True)]

    def draw(state, _):
        state = kernel.sample(state, (Y,), {})
        return state, state.z["mu"]

    def run(state):
        return lax.scan(draw, state, None, length=DRAWS)[1]

    # A loop over groups: vmap would make one of them.
    states = jax.tree.map(lambda *x: jnp.stack(x), *states)
    mu = np.asarray(jax.jit(partial(lax.map, run))(states), float)

    def score(values, expected):
        means = values.mean((1, 2))
        return (means.mean() - expected) / stats.sem(means)

    assert abs(score(mu, exact.mean)) < 4
    assert abs(score((mu - exact.mean) ** 2, exact.variance)) < 4
    last = mu[:, -1, 0]  # a chain of each group
    assert stats.kstest(last, lambda x: np.interp(x, exact.grid, exact.cdf)).pvalue > (
        1e-4
    )


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("steps_per_draw", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_chains_that_accept_together_have_the_same_batch(share, steps_per_draw):
    kernel = MHBT(
        model,
        RandomWalk(0.2),
        c_n=1.0,
        share_batches=share,
        steps_per_draw=steps_per_draw,
        **PLAIN,
        **FIXED,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=100,
        num_chains=5,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), Y, extra_fields=("batch", "accepted"))
    fields = mcmc.get_extra_fields(group_by_chain=True)
    all_steps = np.asarray(fields["accepted"]) == steps_per_draw
    rows = np.asarray(fields["batch"]["N"])
    pairs = [(i, j) for i in range(5) for j in range(i)]
    same = [
        np.all(rows[i] == rows[j], axis=-1)[all_steps[i] & all_steps[j]]
        for i, j in pairs
    ]
    assert sum(map(len, same)) > 10
    assert np.concatenate(same).all() == share
    # What they do with it is each chain's own.
    mu = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])
    assert len(np.unique(mu[:, -1])) == 5


def test_a_single_chain_is_the_same():
    runs = []
    for share in (True, False):
        mcmc = MCMC(
            make_kernel("walk", share_batches=share),
            num_warmup=0,
            num_samples=50,
            progress_bar=False,
        )
        mcmc.run(random.key(0), Y)
        runs.append(np.asarray(mcmc.get_samples()["mu"]))
    assert np.array_equal(*runs)
