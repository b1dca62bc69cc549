"""
Long vectors, as the weights of networks are.

On a CPU some of what JAX does with them takes longer than the gradient of a network.
Here is what XLA makes fast; short vectors go the usual way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from itertools import accumulate
import math
from typing import Any

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from numpyro_mhbt.keys import threefry

_LONG = 10_000
_FEW = 16


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Blocks:
    """
    A long vector, left as the arrays of its sites.

    To put them into one and take them apart again are passes over memory, which for a
    network cost as much as the mathematics in between.
    """

    tree: Any

    def __add__(self, other: Blocks) -> Blocks:
        return Blocks(jax.tree.map(jnp.add, self.tree, other.tree))

    def __mul__(self, scalar: jax.Array) -> Blocks:
        return Blocks(jax.tree.map(lambda x: scalar * x, self.tree))

    __rmul__ = __mul__

    @property
    def size(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.tree))

    @property
    def dtype(self) -> Any:
        return jax.tree.leaves(self.tree)[0].dtype


Vector = Any
"""An array, flat, or :class:`Blocks`: what can be added, and scaled by a number."""


def is_long(tree: Any) -> bool:
    """Whether :class:`Blocks` pay."""
    leaves = jax.tree.leaves(tree)
    floats = all(leaf.dtype == jnp.float32 for leaf in leaves)
    return floats and sum(leaf.size for leaf in leaves) >= _LONG


def as_vector(tree: Any, like: Vector) -> Vector:
    """Values by site, arranged as ``like``."""
    return Blocks(tree) if isinstance(like, Blocks) else flatten(tree)


def dot(a: Vector, b: Vector) -> jax.Array:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return reduce(jnp.add, (jnp.sum(x.ravel() * y.ravel()) for x, y in pairs))


def few(vector: Vector) -> jax.Array:
    """Some of its numbers."""
    leaves = [leaf.ravel() for leaf in jax.tree.leaves(vector)]
    return jnp.concatenate([x[:: max(x.size // _FEW, 1)] for x in leaves])


def normal(rng_key: jax.Array, like: Vector) -> Vector:
    """Standard Gaussian, of the shape and type of ``like``."""
    leaves, tree = jax.tree.flatten(like)
    is_quick = like.size >= _LONG and like.dtype == jnp.float32
    draw = _long_normal if is_quick else _short_normal
    keys = random.split(rng_key, len(leaves)) if len(leaves) > 1 else [rng_key]
    return jax.tree.unflatten(tree, map(draw, keys, leaves))


def _short_normal(rng_key: jax.Array, like: jax.Array) -> jax.Array:
    return random.normal(rng_key, like.shape, like.dtype)


def _long_normal(rng_key: jax.Array, like: jax.Array) -> jax.Array:
    """
    JAX inverts the distribution function, and passes over the vector several times.
    Here each number is the projection of a point of the plane (Box and Muller), and
    all is one loop.
    """
    even = like.size + like.size % 2  # XLA is ten times slower with an odd number
    words = random.bits(rng_key, (2,), jnp.uint32)

    def make() -> jax.Array:
        x, y = threefry(words, even)
        square = -2 * jnp.log(_unit(x) + np.float32(2**-25))
        # On half the circle, since the sine of the other half is that of this one.
        angle = np.float32(math.pi) * (_unit(y) - np.float32(0.5))
        return jnp.sqrt(square) * _sine(angle)

    # In a branch, lest XLA make all this anew for each use of the numbers.
    z = lax.cond(_is_number(like), make, lambda: jnp.zeros(even, like.dtype))
    return z[: like.size].reshape(like.shape)


def _is_number(like: jax.Array) -> jax.Array:
    """Always true of what moves, but not to XLA."""
    return like.ravel()[0] < jnp.inf


def _unit(bits: jax.Array) -> jax.Array:
    """Uniform in [0, 1), of the upper 24 bits."""
    return (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2**-24)


def _sine(x: jax.Array) -> jax.Array:
    """For |x| at most π/2, to float32: XLA's own is not vectorised on a CPU."""
    series = jnp.zeros_like(x)
    for k in reversed(range(6)):
        series = series * x**2 + np.float32((-1) ** k / math.factorial(2 * k + 1))
    return series * x


def flatten(tree: Any) -> jax.Array:
    """The vector of ``ravel_pytree``, whose concatenation is slow if long."""
    leaves = jax.tree.leaves(tree)
    sizes = [leaf.size for leaf in leaves]
    if sum(sizes) < _LONG:
        return ravel_pytree(tree)[0]
    dtype = jnp.result_type(*leaves)
    pieces = [leaf.ravel().astype(dtype) for leaf in leaves]
    ends = list(accumulate(sizes))
    # The largest leaves room for the others, which saves a pass over zeros.
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    room = ends[largest] - sizes[largest], ends[-1] - ends[largest], 0
    flat = lax.pad(pieces[largest], jnp.zeros((), dtype), [room])
    for i, piece in enumerate(pieces):
        if i != largest:
            flat = lax.dynamic_update_slice(flat, piece, (ends[i] - sizes[i],))
    return flat
