"""The batch draw is uniform without replacement, at any size; plates made whole."""

import re

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import Predictive
import pytest
from scipy import stats

from numpyro_mhbt import full_data
from numpyro_mhbt.keys import quick
from numpyro_mhbt.plates import _SORT_BELOW, draw_rows


def draws(n, m, num, seed=0):
    keys = random.split(random.key(seed), num)
    return np.asarray(jax.jit(jax.vmap(lambda key: draw_rows(key, n, m)))(keys))


@pytest.mark.parametrize(
    "n, m",
    [
        (1, 1),
        (2, 1),
        (7, 7),
        (_SORT_BELOW, 100),
        (_SORT_BELOW + 1, 1),
        (_SORT_BELOW + 1, _SORT_BELOW),
        (1009, 1008),  # a prime: some rows fall into the overhang
        (10_007, 500),
        (10**5, 1000),
        (10**6 + 3, 10**5),
        (10**9, 10**4),
        (10**9 + 7, 10**4),
    ],
)
def test_rows_are_distinct_and_in_range(n, m):
    for rows in draws(n, m, 5):
        assert rows.shape == (m,)
        assert rows.min() >= 0
        assert rows.max() < n
        assert np.unique(rows).size == m


@pytest.mark.parametrize("positions", [(0, 1), (2, 4)])
@pytest.mark.parametrize("n", [6, 40, _SORT_BELOW + 1, 600, 1009])
def test_pairs_of_rows_are_equally_likely(n, positions):
    num_pairs = n * (n - 1) // 2
    rows = draws(n, max(positions) + 1, 8 * num_pairs, seed=n)
    low, high = np.sort(rows[:, positions], axis=1).astype(np.int64).T
    counts = np.bincount(low * n + high, minlength=n * n).reshape(n, n)
    assert stats.chisquare(counts[np.triu_indices(n, 1)]).pvalue > 1e-4


@pytest.mark.parametrize("n", [_SORT_BELOW + 1, 10_007, 10**9])
def test_single_rows_are_uniform_in_every_position(n):
    rows = draws(n, 16, 20_000, seed=1)
    for position in (0, 7, 15):
        assert stats.kstest((rows[:, position] + 0.5) / n, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("n", [_SORT_BELOW + 1, 5000, 10**6])
def test_differences_of_neighbours_are_uniform(n):
    """Positions that enter the bijection side by side must not come out so."""
    rows = draws(n, 64, 5000, seed=2).astype(np.int64)
    gaps = np.diff(rows, axis=1) % n
    bins = np.arange(1, n) * 50 // n  # a gap of 0 cannot be
    counts = np.bincount(gaps.ravel() * 50 // n, minlength=50)
    expected = np.bincount(bins, minlength=50) / (n - 1) * gaps.size
    assert stats.chisquare(counts, expected).pvalue > 1e-4
    assert np.mean(gaps == 1) == pytest.approx(1 / n, abs=5 / np.sqrt(n * gaps.size))


def test_prediction_for_fewer_rows_than_a_batch():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("N", len(x), subsample_size=100):
            xb = numpyro.subsample(x, event_dim=0)
            yb = numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(w * xb, 0.1), obs=yb)

    draws = {"w": jnp.array([1.0, 2.0])}
    y = Predictive(full_data(model), draws)(random.key(0), jnp.array([1.0, 10.0]))["y"]
    assert np.allclose(y, [[1, 10], [2, 20]], atol=1)


@pytest.mark.parametrize("like", [lambda key: key, lambda key: quick(key)[0]])
def test_rows_are_drawn_once_and_not_for_each_column(like):
    """A program that gathers with these rows and keeps them, as the kernel does."""

    def batch(key, x):
        rows = draw_rows(like(key), len(x), 1000)
        return x[rows], rows

    program = jax.jit(batch).lower(random.key(0), jnp.zeros((10**5, 20))).compile()
    (gather,) = re.findall(
        r"gather\w*fusion\S* = .* fusion\((.*?)\)", program.as_text()
    )
    assert gather.count("%") == 2  # the data and the rows, not what rows are made of
