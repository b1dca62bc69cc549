"""Warm-up: step size and mass matrix, by NumPyro's own adapters."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from numpyro.infer.hmc_util import warmup_adapter

from numpyro_mhbt.step import Probe

_MEMORY = 30


def acceptance_ceiling(noise_variance: ArrayLike) -> jax.Array:
    """
    Highest acceptance rate that Gaussian noise allows, 2 Φ(-sqrt(v / 2)).

    Two batches differ, so even a move of length zero is accepted only at times.

    >>> print(f"{acceptance_ceiling(1.0):.2f}")
    0.48
    """
    return 2 * norm.cdf(-jnp.sqrt(jnp.asarray(noise_variance) / 2))


class WarmupState(NamedTuple):
    """What warm-up has learnt."""

    step_size: jax.Array
    mass_matrix_sqrt_inv: jax.Array
    noise_variance: jax.Array
    """At the chain's points on fresh batches: a moving average."""
    hmc: Any
    """State of NumPyro's adapter."""


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

    def __init__(
        self,
        num_warmup: int,
        target_accept_prob: float,
        *,
        adapt_step_size: bool,
        adapt_mass_matrix: bool,
        dense_mass: bool,
    ) -> None:
        self._init, self._update = warmup_adapter(
            num_warmup,
            adapt_step_size=adapt_step_size,
            adapt_mass_matrix=adapt_mass_matrix,
            dense_mass=dense_mass,
            target_accept_prob=target_accept_prob,
        )

    def init(self, z: jax.Array, step_size: jax.Array) -> WarmupState:
        # The key serves a search for the first step size that is not used here.
        hmc = self._init((z,), jax.random.key(0), step_size, mass_matrix_size=z.size)
        return _state(jnp.zeros_like(step_size), hmc._replace(rng_key=None))

    def update(
        self,
        i: jax.Array,
        probe: Probe,
        z: jax.Array,
        c_n: jax.Array,
        state: WarmupState,
    ) -> WarmupState:
        hmc = self._update(i, probe.accept_prob, (jnp.sqrt(c_n) * z,), state.hmc)
        # A geometric mean: the noise is larger by orders of magnitude before the chain
        # has found the mode.
        weight = 1 / jnp.minimum(i + 1, _MEMORY)
        noise = state.noise_variance ** (1 - weight) * probe.noise_variance**weight
        noise = jnp.where(jnp.isfinite(noise), noise, state.noise_variance)
        return _state(noise, hmc)


def _state(noise_variance: jax.Array, hmc: Any) -> WarmupState:
    return WarmupState(hmc.step_size, hmc.mass_matrix_sqrt_inv, noise_variance, hmc)
