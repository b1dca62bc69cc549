"""Keys whose numbers are made in one operation: the numbers are those of JAX."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from test_contract import x64  # noqa: F401 (a fixture)

from numpyro_mhbt import MHBT
from numpyro_mhbt.keys import quick, threefry

KEYS = {
    "typed": random.key(7),
    "raw": random.PRNGKey(7),
    "large": random.wrap_key_data(jnp.array([123, 2**32 - 5], jnp.uint32)),
}


def test_bits_are_those_of_threefry():
    x, y = threefry(random.key_data(KEYS["large"]), 50_001)
    assert np.array_equal(x ^ y, random.bits(KEYS["large"], (50_001,), jnp.uint32))


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (0,)])
def test_same_numbers(name, shape):
    key, _ = quick(KEYS[name])
    for draw in (
        lambda key: random.bits(key, shape, jnp.uint32),
        lambda key: random.bits(key, shape, jnp.uint8),
        lambda key: random.uniform(key, shape),
        lambda key: random.normal(key, shape),
        lambda key: random.randint(key, shape, 0, 1000),
        lambda key: random.key_data(random.split(key, shape)),
        lambda key: random.key_data(random.fold_in(key, 3)),
        lambda key: random.permutation(key, 20),
    ):
        assert np.array_equal(draw(key), draw(KEYS[name]))


def test_same_numbers_in_float64(x64):  # noqa: F811
    key, _ = quick(KEYS["typed"])
    numbers = random.normal(key, (5,))
    assert numbers.dtype == np.float64
    assert np.array_equal(numbers, random.normal(KEYS["typed"], (5,)))


def test_same_numbers_for_many_chains():
    keys = random.split(KEYS["typed"], 4)
    found = jax.vmap(lambda key: random.normal(quick(key)[0], (3,)))(keys)
    assert np.array_equal(found, jax.vmap(lambda key: random.normal(key, (3,)))(keys))


@pytest.mark.parametrize("key", [*KEYS.values(), random.key(7, impl="rbg")])
def test_keys_come_back_as_they_were(key):
    other, back = quick(key)
    later = back(random.split(other)[0])
    assert later.dtype == key.dtype
    expected = random.split(key)[0]
    assert np.array_equal(random.key_data(later), random.key_data(expected))


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("N", len(y), subsample_size=20):
        numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))


def test_a_step_has_no_loop_of_random_numbers():
    """What ``quick`` is for: on a CPU each call with JAX's own keys is a loop."""
    y = jnp.arange(1000.0)
    kernel = MHBT(model, c_n=10)
    state = kernel.init(random.key(0), 0, None, (y,), {})
    step = jax.jit(lambda state: kernel.sample(state, (y,), {}))
    assert "threefry" not in step.lower(state).as_text()
    usual = jax.jit(lambda state: random.split(state.rng_key))
    assert "threefry" in usual.lower(state).as_text()
