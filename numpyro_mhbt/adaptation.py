"""Warm-up: step size and mass matrix, by NumPyro's own adapters."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from numpyro.infer.hmc_util import warmup_adapter


def acceptance_ceiling(noise_variance: ArrayLike) -> jax.Array:
    """
    The acceptance rate of a move of length zero, 2 Φ(-sqrt(v / 2)).

    Two batches differ, so even standing still is rejected at times. A step size that
    is tuned to accept more often than this shrinks to nothing.

    >>> print(f"{acceptance_ceiling(1.0):.2f}")
    0.48
    """
    return 2 * norm.cdf(-jnp.sqrt(jnp.asarray(noise_variance) / 2))


class Adapter:
    """
    NumPyro's ``warmup_adapter`` with a moving target for the acceptance rate.

    The mass matrix is that of sqrt(c_n) θ, the scale on which one row's information
    is of order one whatever the temperature: NumPyro's regularisation and first step
    sizes presume such a scale.

    :param accept_fraction: aim at this share of :func:`acceptance_ceiling`.
    :param target_accept_prob: aim at this rate instead.
    """

    def __init__(
        self,
        num_warmup: int,
        accept_fraction: float,
        target_accept_prob: float | None,
        *,
        adapt_step_size: bool,
        adapt_mass_matrix: bool,
        dense_mass: bool,
    ) -> None:
        self._fraction = accept_fraction
        self._target = target_accept_prob
        # The target enters through `update`, where the noise is known.
        self._init, self._update = warmup_adapter(
            num_warmup,
            adapt_step_size=adapt_step_size,
            adapt_mass_matrix=adapt_mass_matrix,
            dense_mass=dense_mass,
            target_accept_prob=0.0,
        )

    def init(self, z: jax.Array, step_size: jax.Array) -> Any:
        # The key serves a search for the first step size that is not used here.
        state = self._init((z,), jax.random.key(0), step_size, mass_matrix_size=z.size)
        return state._replace(rng_key=None)

    def update(
        self,
        i: jax.Array,
        accept_prob: jax.Array,
        noise_variance: jax.Array,
        z: jax.Array,
        c_n: jax.Array,
        state: Any,
    ) -> Any:
        if self._target is None:
            target = self._fraction * acceptance_ceiling(noise_variance)
        else:
            target = jnp.asarray(self._target)
        return self._update(i, accept_prob - target, (jnp.sqrt(c_n) * z,), state)
