"""Warm-up: step size and mass matrix, by NumPyro's own adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jax.typing import ArrayLike
from numpyro.infer.hmc_util import warmup_adapter

from numpyro_mhbt.settings import Settings

_SHRINKAGE = 1e-3  # where NumPyro's `welford_covariance` shrinks to


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
    unit: jax.Array
    """Scale on which the mass matrix is learnt: a vector, or S with covariance S S'."""
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

    The mass matrix is learnt in coordinates in which what is known beforehand is the
    identity: a Gaussian approximation of the target, or else 1 / c_n, the scale on
    which a row's information is of order one. So a diagonal one there has all the
    correlations of that approximation. NumPyro shrinks a covariance towards 1e-3 times
    the identity, which is made to mean just that. (Draws of a short window do not span
    the space; shrunk to nothing in the other directions, the chain would never find
    out.) Under an expansion of order 1 or 2 the approximation is kept as it is: they
    are good where it is, and no short run knows better.

    :param approximated: whether there is a Gaussian approximation.
    """

    def __init__(self, num_warmup: int, settings: Settings, approximated: bool) -> None:
        self._num_warmup = num_warmup
        self._settings = settings
        expanded = settings.taylor_order > 0
        keep = approximated and expanded and not settings.dense_mass
        self._init, self._update = warmup_adapter(
            num_warmup,
            find_reasonable_step_size=_tenth,
            adapt_step_size=settings.adapt_step_size
            and settings.step_size_schedule is None,
            adapt_mass_matrix=settings.adapt_mass_matrix and not keep,
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
        :param spread: S with covariance S S' of what is to be sampled, if known, and
            its columns orthogonal.
        """
        unit = jnp.full_like(z, 1 / jnp.sqrt(c_n))
        if spread is not None and self._settings.adapt_mass_matrix:
            unit = spread
        mass = jnp.full_like(z, _SHRINKAGE)
        mass = jnp.diag(mass) if self._settings.dense_mass else mass
        # The key serves a search for the first step size that is not used here.
        hmc = self._init((z,), jax.random.key(0), step_size, mass)
        hmc = hmc._replace(rng_key=None, step_size=step_size)
        return self._state(hmc, unit, c_n)

    def update(
        self,
        i: jax.Array,
        paired_accept_prob: jax.Array,
        z: jax.Array,
        c_n: jax.Array,
        state: WarmupState,
    ) -> WarmupState:
        # A step that is as long as can be must not be told to grow.
        longest = state.step_size >= self._settings.proposal.max_step_size
        target = self._settings.target_accept_prob
        no_more = jnp.minimum(paired_accept_prob, target)
        paired_accept_prob = jnp.where(longest, no_more, paired_accept_prob)
        unit = state.unit
        z = z / unit if unit.ndim == 1 else (z @ unit) / jnp.sum(unit**2, axis=0)
        z = math.sqrt(_SHRINKAGE) * z
        hmc = self._update(i, paired_accept_prob, (z,), state.hmc)
        return self._state(hmc, unit, c_n)

    def _state(self, hmc: Any, unit: jax.Array, c_n: jax.Array) -> WarmupState:
        sqrt_inv = hmc.mass_matrix_sqrt_inv
        if unit.ndim == 1:
            sqrt_inv = sqrt_inv * unit
        elif sqrt_inv.ndim == 1:
            sqrt_inv = sqrt_inv[:, None] * unit.T
        else:
            sqrt_inv = sqrt_inv @ unit.T
        sqrt_inv *= jnp.sqrt(c_n / _SHRINKAGE)
        longest = self._settings.proposal.max_step_size
        step_size = jnp.minimum(hmc.step_size, longest)
        return WarmupState(step_size, sqrt_inv, unit, hmc, self._num_warmup)


def _tenth(step_size: jax.Array, *_: Any) -> jax.Array:
    """
    Start each window of warm-up where the last one ended.

    NumPyro starts them at ten times this value, since HMC gains by long steps; a step
    ten times too long is never accepted here, and a short window does not recover.
    """
    return step_size / 10
