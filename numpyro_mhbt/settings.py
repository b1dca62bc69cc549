"""What the user asked for, checked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
import math
from numbers import Real
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_mhbt.control import Taylor
from numpyro_mhbt.proposals import Proposal, Schedule


@dataclass(frozen=True)
class Settings:
    """The arguments of :class:`~numpyro_mhbt.MHBT`, where they are documented."""

    model: Callable
    proposal: Proposal
    c_n: float | None
    temperature: float | Schedule | None
    target_noise: float
    control_variate: Taylor | None
    bias_correction: bool
    num_blocks: int
    share_batches: bool
    steps_per_draw: int
    on_reject: Literal["keep", "refresh"]
    temper_prior: bool
    adapt_step_size: bool
    adapt_mass_matrix: bool
    dense_mass: bool
    target_accept_prob: float
    init_strategy: Callable | None

    def __post_init__(self) -> None:
        if isinstance(self.proposal, type) or not hasattr(self.proposal, "log_ratio"):
            raise TypeError(
                "`proposal` must be a proposal such as `RSGLD()`, `SGLD()` or "
                f"`RandomWalk()`, got {self.proposal!r}."
            )
        if not isinstance(self.control_variate, Taylor | None):
            raise TypeError(
                "`control_variate` must be None or such as `Taylor(order=0)`, got "
                f"{self.control_variate!r}."
            )
        if self.c_n is not None and self.temperature is not None:
            raise ValueError(
                f"Give one of `c_n` and `temperature`, got c_n={self.c_n} and "
                f"temperature={self.temperature}: they are tied by temperature = n / "
                "c_n."
            )
        _check_positive("c_n", self.c_n)
        if not callable(self.temperature):
            _check_positive("temperature", self.temperature)
        _check_positive("target_noise", self.target_noise)
        _check_positive("target_accept_prob", self.target_accept_prob)
        if self.target_accept_prob >= 1:
            raise ValueError(
                "`target_accept_prob` must lie between 0 and 1, got "
                f"{self.target_accept_prob}."
            )
        _check_count("num_blocks", self.num_blocks)
        if self.share_batches and self.num_blocks > 1:
            raise ValueError(
                f"`share_batches=True` does not go with num_blocks={self.num_blocks}: "
                "with blocks each chain keeps a part of a batch of its own."
            )
        _check_count("steps_per_draw", self.steps_per_draw)
        if self.on_reject not in ("keep", "refresh"):
            raise ValueError(
                f"`on_reject` must be 'keep' or 'refresh', got {self.on_reject!r}."
            )

    @property
    def taylor_order(self) -> int:
        """Of the control variate, -1 if there is none."""
        return -1 if self.control_variate is None else self.control_variate.order

    @property
    def temperature_schedule(self) -> Schedule | None:
        return self.temperature if callable(self.temperature) else None

    @property
    def step_size_schedule(self) -> Schedule | None:
        given, longest = self.proposal.step_size, self.proposal.max_step_size
        if not callable(given):
            return None
        return lambda i: jnp.minimum(given(i), longest)


def _check_positive(name: str, value: Any) -> None:
    if value is None:
        return
    if not isinstance(value, Real | np.ndarray | jax.Array):
        raise TypeError(f"`{name}` must be a number, got {value!r}.")
    if not (float(value) > 0 and math.isfinite(value)):
        raise ValueError(f"`{name}` must be positive and finite, got {value}.")


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer):
        raise TypeError(f"`{name}` must be an integer, got {value!r}.")
    if value < 1:
        raise ValueError(f"`{name}` must be positive, got {value}.")
