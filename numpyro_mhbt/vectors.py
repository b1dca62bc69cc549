"""
Long vectors, as the weights of networks are.

On a CPU some of what JAX does with them takes longer than the gradient of a network.
Here is the same, written so that XLA makes it fast; short vectors go the usual way.
"""

from __future__ import annotations

from typing import Any

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

_LONG = 10_000
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))


def normal(rng_key: jax.Array, like: jax.Array) -> jax.Array:
    """
    Standard Gaussian, of the shape and type of the vector ``like``.

    JAX's generator (threefry2x32 of Salmon and others, 20 rounds) passes over the
    vector several times; here it is written in one piece.
    """
    if like.size < _LONG or like.dtype != jnp.float32:
        return random.normal(rng_key, like.shape, like.dtype)
    bits = long_bits(random.bits(rng_key, (2,), jnp.uint32), like.size)
    # The upper bits are the fraction of a number in [1, 2).
    one = lax.bitcast_convert_type(np.float32(1), jnp.uint32)
    unit = lax.bitcast_convert_type(bits >> np.uint32(9) | one, jnp.float32) - 1
    low = np.nextafter(np.float32(-1), np.float32(0))
    return np.float32(2**0.5) * lax.erf_inv(jnp.maximum(unit * (1 - low) + low, low))


def long_bits(key: jax.Array, size: int) -> jax.Array:
    """What ``random.bits`` gives for a threefry key of these two words."""
    words = key[0], key[1], key[0] ^ key[1] ^ np.uint32(0x1BD11BDA)
    x = jnp.full((size,), words[0])
    y = lax.iota(jnp.uint32, size) + words[1]
    for i in range(5):
        for r in _ROTATIONS[i % 2]:
            x = x + y
            y = x ^ (y << np.uint32(r) | y >> np.uint32(32 - r))
        x = x + words[(i + 1) % 3]
        y = y + words[(i + 2) % 3] + np.uint32(i + 1)
    return x ^ y


def flatten(tree: Any) -> jax.Array:
    """The vector of ``ravel_pytree``, whose concatenation is slow if long."""
    leaves = jax.tree.leaves(tree)
    size = sum(leaf.size for leaf in leaves)
    if size < _LONG:
        return ravel_pytree(tree)[0]
    flat = jnp.zeros(size, jnp.result_type(*leaves))
    start = 0
    for leaf in leaves:
        piece = leaf.ravel().astype(flat.dtype)
        flat = lax.dynamic_update_slice(flat, piece, (start,))
        start += leaf.size
    return flat
