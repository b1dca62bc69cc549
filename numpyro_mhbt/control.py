"""Control variates: what is subtracted from each row to quieten the estimate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from numpyro.optim import Adam

from numpyro_mhbt.plates import Batch, Rows


@dataclass(frozen=True)
class Taylor:
    r"""
    Taylor expansion of each row's log-likelihood around a reference point.

    The expansion :math:`t_i` of order 0, 1 or 2 is subtracted from each row of the
    batch, and its sum over all rows, known from one pass over the data, is added:

    .. math:: \sum_{i=1}^n t_i(\theta)
        + \frac nm \sum_{i \in I} \bigl[\ell_i(\theta) - t_i(\theta)\bigr].

    The average over all batches is the log-likelihood of all rows as before, but only
    what the expansion misses is noise. Order 0 takes away what depends on the data
    alone (the :math:`-x^2/2` of a Gaussian), and :math:`c_n` may then grow like m/d.
    Orders 1 and 2 leave noise that hardly grows with :math:`c_n`: where the posterior
    is near its Gaussian limit and m well above d², they sample it at T = 1.

    Expansions are taken in unconstrained space by directional derivatives, O(m d) per
    step; order 2 keeps one d x d matrix.

    :param int order: 0, 1 or 2.
    :param dict ref_params: the reference point, keyed by site, in the constrained
        space. ``None``: found by a short mini-batch optimisation, the same for all
        chains.

    >>> Taylor(order=2)
    Taylor(order=2, ref_params=None)
    """

    order: int = 0
    ref_params: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.order not in (0, 1, 2) or isinstance(self.order, bool):
            raise ValueError(f"Taylor: order must be 0, 1 or 2, got {self.order!r}.")


class Reference(NamedTuple):
    """The point of a :class:`Taylor` expansion, and its sums over all rows there."""

    z: jax.Array
    """θ_ref, unconstrained and flat."""
    grad: jax.Array | None = None
    """Of the log-likelihood of all rows; ``None`` below order 1."""
    hessian: jax.Array | None = None
    """Of the log-likelihood of all rows; ``None`` below order 2."""


def remainder(
    rows: Rows, rows_at: Callable[[jax.Array], Rows], reference: Reference, z: jax.Array
) -> tuple[Rows, jax.Array]:
    """
    What the expansion misses of each row, and its sum over all rows but a constant.

    :param rows: ``rows_at(z)``.
    """
    step = z - reference.z
    if reference.grad is None:
        return jax.tree.map(_less, rows, rows_at(reference.z)), jnp.zeros(())

    def along(t: jax.Array) -> Rows:
        return rows_at(reference.z + t * step)

    def first(t: jax.Array) -> tuple[Rows, Rows]:
        return jax.jvp(along, (t,), (jnp.ones_like(t),))

    start = jnp.zeros((), z.dtype)
    known = reference.grad @ step
    if reference.hessian is None:
        at_reference, slope = first(start)
        expansion = jax.tree.map(jnp.add, at_reference, slope)
    else:
        (at_reference, slope), (_, bend) = jax.jvp(
            first, (start,), (jnp.ones_like(start),)
        )
        expansion = jax.tree.map(
            lambda a, b, c: a + b + c / 2, at_reference, slope, bend
        )
        known += step @ (reference.hessian @ step) / 2
    return jax.tree.map(jnp.subtract, rows, expansion), known


def _less(row: jax.Array, at_reference: jax.Array) -> jax.Array:
    """The difference, or the row itself where the reference has no density."""
    return row - jnp.where(jnp.isfinite(at_reference), at_reference, 0.0)


def find_reference(
    rng_key: jax.Array,
    z: jax.Array,
    draw: Callable[[jax.Array], Batch],
    gradient: Callable[[jax.Array, Batch], jax.Array],
    num_steps: int,
) -> jax.Array:
    """Climb a log-density from ``z`` by Adam on mini-batches."""
    adam = Adam(lambda i: 0.1 * 0.01 ** (i / num_steps))

    def climb(carry: tuple[Any, jax.Array], key: jax.Array) -> tuple[Any, None]:
        state, mean = carry
        grad = gradient(adam.get_params(state), draw(key))
        # A step into a region without density must not spoil the search.
        state = adam.update(-jnp.where(jnp.isfinite(grad), grad, 0.0), state)
        # An average of the late steps is far closer to the mode than the last one.
        return (state, mean + (adam.get_params(state) - mean) * 10 / num_steps), None

    keys = random.split(rng_key, num_steps)
    (_, mean), _ = lax.scan(climb, (adam.init(z), z), keys)
    return mean
