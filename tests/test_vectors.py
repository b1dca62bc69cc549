"""Long vectors: beside JAX's own functions."""

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_mhbt.vectors import flatten, long_bits, normal

SIZE = 50_001


def test_bits_are_those_of_threefry():
    key = jnp.array([123, 2**32 - 5], jnp.uint32)
    expected = random.bits(random.wrap_key_data(key), (SIZE,), jnp.uint32)
    x, y = long_bits(key, SIZE)
    assert np.array_equal(x ^ y, expected)


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
