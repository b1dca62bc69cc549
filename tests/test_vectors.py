"""Long vectors: beside JAX's own functions."""

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_mhbt.vectors import (
    Blocks,
    as_vector,
    dot,
    few,
    flatten,
    normal,
)

SIZE = 50_001


@pytest.mark.parametrize("size", [SIZE, SIZE + 1])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_noise_is_gaussian(impl, size):
    keys = random.split(random.key(0, impl=impl), 20)
    z = np.asarray(jax.lax.map(lambda key: normal(key, jnp.zeros(size)), keys))
    assert z.shape == (20, size)
    assert stats.kstest(np.ravel(z), "norm").pvalue > 0.01
    # Far out, where Kolmogorov and Smirnov do not look.
    tail = 2 * stats.norm.sf(4.0)
    count = np.sum(np.abs(z) > 4)
    assert stats.binomtest(int(count), z.size, tail).pvalue > 0.01
    neighbours = np.corrcoef(z[:, 1:].ravel(), z[:, :-1].ravel())[0, 1]
    assert abs(neighbours) < 4 / np.sqrt(z.size)
    assert np.abs(np.corrcoef(z) - np.eye(20)).max() < 5 / np.sqrt(size)


def test_short_noise_is_that_of_jax():
    key = random.key(1)
    expected = random.normal(key, (5,))
    assert np.array_equal(normal(key, jnp.zeros(5)), expected)


@pytest.mark.parametrize("rows", [3, 300])
def test_flat_in_the_order_of_jax(rows):
    tree = {
        "b": random.normal(random.key(0), (rows, 50)),
        "a": jnp.arange(7.0),
        "c": jnp.array(3.0),
    }
    assert np.array_equal(flatten(tree), ravel_pytree(tree)[0])


def test_blocks_are_one_vector():
    tree = {"b": random.normal(random.key(0), (300, 50)), "a": jnp.arange(7.0)}
    other = jax.tree.map(lambda x: 1 - 2 * x, tree)
    a, b, scalar = Blocks(tree), Blocks(other), jnp.array(0.3)
    flat_a, flat_b = flatten(tree), flatten(other)
    assert np.array_equal(flatten((a + scalar * b).tree), flat_a + scalar * flat_b)
    assert float(dot(a, b)) == pytest.approx(float(dot(flat_a, flat_b)), rel=1e-5)
    assert (a.size, a.dtype) == (flat_a.size, flat_a.dtype)
    assert jnp.any(few(a) != few(a + b)) and jnp.all(few(a) == few(a))
    assert isinstance(as_vector(tree, a), Blocks)
    assert np.array_equal(as_vector(tree, flat_a), flat_a)


def test_noise_of_blocks():
    like = Blocks({"a": jnp.zeros((2, 30_000)), "b": jnp.zeros(30_001)})
    z = normal(random.key(3), like).tree
    assert jax.tree.map(jnp.shape, z) == jax.tree.map(jnp.shape, like.tree)
    (first, second), third = np.asarray(z["a"]), np.asarray(z["b"])[1:]
    for part in (first, second, third):
        assert stats.kstest(part, "norm").pvalue > 0.01
    between = np.corrcoef([first, second, third]) - np.eye(3)
    assert np.abs(between).max() < 4 / np.sqrt(30_000)
