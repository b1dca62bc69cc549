"""Control variates: what is subtracted from each row to quieten the estimate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
from jax import lax, random
import jax.numpy as jnp
from numpyro.optim import Adam

from numpyro_mhbt.plates import Batch
from numpyro_mhbt.step import Point

_SEARCH_STEPS = 1000


@dataclass(frozen=True)
class Taylor:
    r"""
    Taylor expansion of each row's log-likelihood around a reference point.

    Order 0 subtracts :math:`\ell_i(\theta_{ref})`. The log-density of all rows changes
    by a constant, so the target is the same, but terms of the data alone (the
    :math:`-x^2/2` of a Gaussian) no longer count as noise.

    :param int order: 0.
    :param dict ref_params: the reference point, keyed by site, in the constrained
        space. ``None``: found by a short mini-batch optimisation, the same for all
        chains.

    >>> Taylor(order=0)
    Taylor(order=0, ref_params=None)
    """

    order: int = 0
    ref_params: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.order != 0:
            raise ValueError(f"Taylor: order must be 0, got {self.order!r}.")


def find_reference(
    rng_key: jax.Array,
    z: jax.Array,
    draw: Callable[[jax.Array], Batch],
    evaluate: Callable[[jax.Array, Batch], Point],
) -> jax.Array:
    """Climb the tempered log-density from ``z`` by Adam on mini-batches."""
    adam = Adam(lambda i: 0.1 * 0.01 ** (i / _SEARCH_STEPS))

    def climb(state: Any, key: jax.Array) -> tuple[Any, None]:
        grad = evaluate(adam.get_params(state), draw(key)).grad
        # A step into a region without density must not spoil the search.
        grad = jnp.where(jnp.isfinite(grad), grad, 0.0)
        return adam.update(-grad, state), None

    state, _ = lax.scan(climb, adam.init(z), random.split(rng_key, _SEARCH_STEPS))
    return adam.get_params(state)
