"""Warm-up: step size and mass matrix, by NumPyro's own adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from numpyro.infer.hmc_util import warmup_adapter

from numpyro_mhbt.settings import Settings


def acceptance_ceiling(noise_variance: ArrayLike) -> jax.Array:
    """
    Highest acceptance rate that Gaussian noise allows, 2 Φ(-sqrt(v / 2)).

    Two batches differ, so even a move of length zero is accepted only at times. With
    blocks v is to be divided by their number: only one of them differs.

    >>> print(f"{acceptance_ceiling(1.0):.2f}")
    0.48
    """
    return 2 * norm.cdf(-jnp.sqrt(jnp.asarray(noise_variance) / 2))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WarmupState:
    """What warm-up has learnt."""

    step_size: jax.Array
    mass_matrix_sqrt_inv: jax.Array
    hmc: Any
    """State of NumPyro's adapter."""
    num_warmup: int = field(metadata={"static": True})


class Adapter:
    """
    NumPyro's ``warmup_adapter``, led by an acceptance rate without mini-batch noise.

    A step size tuned to accept more often than :func:`acceptance_ceiling` shrinks to
    nothing, and in loud noise the overall rate says little in any case. So each step
    of warm-up also evaluates the current θ on the proposal's batch, and the step size
    follows the acceptance rate of that pair, in which most of the noise cancels. The
    overall rate is then about this one times the ceiling.

    The mass matrix is that of sqrt(c_n) θ, the scale on which one row's information
    is of order one whatever the temperature: NumPyro's regularisation and first step
    sizes presume such a scale.
    """

    def __init__(self, num_warmup: int, settings: Settings) -> None:
        self._num_warmup = num_warmup
        self._adapt_mass_matrix = settings.adapt_mass_matrix
        self._dense_mass = settings.dense_mass
        self._init, self._update = warmup_adapter(
            num_warmup,
            adapt_step_size=settings.adapt_step_size
            and settings.step_size_schedule is None,
            adapt_mass_matrix=settings.adapt_mass_matrix,
            dense_mass=settings.dense_mass,
            target_accept_prob=settings.target_accept_prob,
        )

    def init(
        self,
        z: jax.Array,
        step_size: jax.Array,
        spread: jax.Array | None,
        c_n: jax.Array,
    ) -> WarmupState:
        """
        :param spread: S with covariance S S' of what is to be sampled, if known.
        """
        mass = None
        if spread is not None and self._adapt_mass_matrix:
            mass = c_n * (
                spread @ spread.T if self._dense_mass else jnp.sum(spread**2, axis=1)
            )
        # The key serves a search for the first step size that is not used here.
        hmc = self._init((z,), jax.random.key(0), step_size, mass)
        return self._state(hmc._replace(rng_key=None))

    def update(
        self,
        i: jax.Array,
        paired_accept_prob: jax.Array,
        z: jax.Array,
        c_n: jax.Array,
        state: WarmupState,
    ) -> WarmupState:
        z = jnp.sqrt(c_n) * z
        return self._state(self._update(i, paired_accept_prob, (z,), state.hmc))

    def _state(self, hmc: Any) -> WarmupState:
        step_size, sqrt_inv = hmc.step_size, hmc.mass_matrix_sqrt_inv
        return WarmupState(step_size, sqrt_inv, hmc, self._num_warmup)
