"""
Long vectors, as the weights of networks are.

On a CPU some of what JAX does with them takes longer than the gradient of a network.
Here is what XLA makes fast; short vectors go the usual way.
"""

from __future__ import annotations

import math
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

    JAX inverts the distribution function, and passes over the vector several times.
    Here each number is the projection of a point of the plane (Box and Muller), and
    all is one loop.
    """
    if like.size < _LONG or like.dtype != jnp.float32:
        return random.normal(rng_key, like.shape, like.dtype)
    odd = like.size % 2
    x, y = long_bits(random.bits(rng_key, (2,), jnp.uint32), like.size + odd)
    square = -2 * jnp.log(_unit(x) + np.float32(2**-25))
    # On half the circle, since the sine of the other half is that of this one.
    z = jnp.sqrt(square) * _sine(np.float32(math.pi) * (_unit(y) - np.float32(0.5)))
    if odd:
        # XLA is ten times slower with an odd number. A branch keeps this loop even.
        z = lax.cond(z[0] < jnp.inf, lambda z: z[:-1], lambda z: z[1:], z)
    return z


def _unit(bits: jax.Array) -> jax.Array:
    """Uniform in [0, 1), of the upper 24 bits."""
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def _sine(x: jax.Array) -> jax.Array:
    """For |x| at most π/2, to float32: XLA's own is not vectorised on a CPU."""
    series = jnp.zeros_like(x)
    for k in reversed(range(6)):
        series = series * x**2 + np.float32((-1) ** k / math.factorial(2 * k + 1))
    return series * x


def long_bits(key: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """The two words whose ``x ^ y`` is ``random.bits`` of this threefry key."""
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
