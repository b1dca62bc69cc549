"""Control variates: what is subtracted from each row to quieten the estimate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
from numpyro.optim import Adam

from numpyro_mhbt.plates import Batch, Rows, are_among


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

    A few rows can spoil an expansion: those of a rare category, whose coefficient only
    they inform. They are then part of every step, at their exact value, and batches
    are drawn for the others.

    :param int order: 0, 1 or 2.
    :param dict ref_params: the reference point, keyed by site, in the constrained
        space. ``None``: found by a short mini-batch optimisation, the same for all
        chains.
    :param int exact_rows: how many rows at most are part of every step, where orders 1
        and 2 would miss too much without them. ``None``: eight times as many as in
        a batch. Never more than a quarter of all rows. Of one subsampled plate in the
        memory of one device only.

    >>> Taylor(order=2)
    Taylor(order=2, ref_params=None, exact_rows=None)
    """

    order: int = 0
    ref_params: Mapping[str, Any] | None = None
    exact_rows: int | None = None

    def __post_init__(self) -> None:
        if self.order not in (0, 1, 2) or isinstance(self.order, bool):
            raise ValueError(f"Taylor: order must be 0, 1 or 2, got {self.order!r}.")
        most = self.exact_rows
        if most is not None and (not isinstance(most, Integral) or most < 0):
            raise ValueError(
                f"Taylor: exact_rows must be None or a number of rows, got {most!r}."
            )


class Reference(NamedTuple):
    """The point of a :class:`Taylor` expansion, and its sums over all rows there."""

    z: jax.Array
    """θ_ref, unconstrained and flat."""
    grad: jax.Array | None = None
    """Of the log-likelihood of all rows; ``None`` below order 1."""
    hessian: jax.Array | None = None
    """Of the log-likelihood of all rows; ``None`` below order 2."""
    always: jax.Array | None = None
    """Rows that are part of every step, in rising order."""

    def join(self, batch: Batch) -> Batch:
        """The rows that a step sees: those of every step, and those drawn."""
        if self.always is None:
            return batch
        return {k: jnp.concatenate([self.always, rows]) for k, rows in batch.items()}

    def part(self, rows: Rows, batch: Batch) -> tuple[Rows, jax.Array]:
        """Of the values of ``join(batch)`` those drawn, and the sum of the others."""
        if self.always is None:
            return rows, jnp.zeros(())
        count = self.always.size
        sure = (jnp.sum(values[:count]) for values in rows.values())
        left = {plates: values[count:] for plates, values in rows.items()}
        return self.without(left, batch), sum(sure, jnp.zeros(()))

    def without(self, rows: Rows, batch: Batch) -> Rows:
        """Values of ``batch``, 0 for rows that are part of every step anyway."""
        if self.always is None:
            return rows
        (drawn,) = batch.values()
        known = are_among(drawn, self.always)
        return {plates: jnp.where(known, 0.0, x) for plates, x in rows.items()}


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
    order = 1 if reference.hessian is None else 2
    known = reference.grad @ step
    if reference.hessian is not None:
        known += step @ (reference.hessian @ step) / 2
    expansion = _expansion(rows_at, order)(reference.z, step)
    return jax.tree.map(jnp.subtract, rows, expansion), known


def _expansion(rows_at: Callable[[jax.Array], Rows], order: int) -> Callable:
    """
    Reference and step to the Taylor expansion of each row.

    Its derivative by the step is the expansion of the gradient, to one order less:
    cheaper than what reverse mode would make of nested forward derivatives.
    """

    def expand(z: jax.Array, step: jax.Array) -> Rows:
        def along(t: jax.Array) -> Rows:
            return rows_at(z + t * step)

        def first(t: jax.Array) -> tuple[Rows, Rows]:
            return jax.jvp(along, (t,), (jnp.ones_like(t),))

        start = jnp.zeros((), z.dtype)
        if order == 1:
            return jax.tree.map(jnp.add, *first(start))
        (value, slope), (_, bend) = jax.jvp(first, (start,), (jnp.ones_like(start),))
        return jax.tree.map(lambda a, b, c: a + b + c / 2, value, slope, bend)

    def forward(z: jax.Array, step: jax.Array) -> tuple[Rows, tuple]:
        return expand(z, step), (z, step)

    def backward(known: tuple, weights: Rows) -> tuple[jax.Array, jax.Array]:
        z, step = known

        def gradient(z: jax.Array) -> jax.Array:
            (grad,) = jax.vjp(rows_at, z)[1](weights)
            return grad

        if order == 1:
            slope = gradient(z)
        else:
            slope = sum(jax.jvp(gradient, (z,), (step,)))
        return jnp.zeros_like(z), slope  # nobody moves the reference

    expansion = jax.custom_vjp(expand)
    expansion.defvjp(forward, backward)
    return expansion


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
