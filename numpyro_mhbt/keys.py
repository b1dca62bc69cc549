"""
Random numbers of a step: those of JAX, bit by bit, each in one operation.

On a CPU JAX makes a loop of each call, however few numbers are asked for, and a step
has seven calls.
"""

from __future__ import annotations

from collections.abc import Callable
import math

import jax
from jax import lax, random
from jax.extend.random import define_prng_impl
import jax.numpy as jnp
import numpy as np

_THREEFRY = "threefry2x32"
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def threefry(key: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The two words of this key at 0, ..., size - 1; ``random.bits`` are ``x ^ y``."""
    words = key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    x = jnp.full((size,), words[0])
    y = lax.iota(jnp.uint32, size) + words[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x = x + y
            y = x ^ (y << np.uint32(r) | y >> np.uint32(32 - r))
        x = x + words[(i + 1) % 3]
        y = y + words[(i + 2) % 3] + np.uint32(i + 1)
    return x, y


def _split(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    words = jnp.stack(threefry(key, math.prod(shape)), -1)
    return _whole(words.reshape(*shape, 2))


def _bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    if width != 32:
        return random.bits(_usual(key), shape, f"uint{width}")
    x, y = threefry(key, math.prod(shape))
    return _whole((x ^ y).reshape(shape))


def _whole(bits: jax.Array) -> jax.Array:
    """In one operation, lest XLA make one for each key or number that is taken out."""
    return lax.optimization_barrier(bits)


def _usual(key: jax.Array) -> jax.Array:
    return random.wrap_key_data(key, impl=_THREEFRY)


_QUICK = define_prng_impl(
    key_shape=(2,),
    seed=lambda seed: random.key_data(random.key(seed, impl=_THREEFRY)),
    split=_split,
    random_bits=_bits,
    fold_in=lambda key, data: random.key_data(random.fold_in(_usual(key), data)),
    name="mhbt_threefry2x32",
    tag="mhbt",
)


def quick(rng_key: jax.Array) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """The key in another guise, and the way back for keys that are split from it."""
    typed = jax.dtypes.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
    if str(random.key_impl(rng_key)) != _THREEFRY:
        return rng_key, lambda key: key
    data = random.key_data(rng_key)

    def back(key: jax.Array) -> jax.Array:
        return _usual(random.key_data(key)) if typed else random.key_data(key)

    return random.wrap_key_data(data, impl=_QUICK), back
