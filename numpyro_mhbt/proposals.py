r"""
Proposals: draw a move, and the log-ratio of its density back and there.

Everything here is plain JAX on vectors, in coordinates whitened by the mass
matrix. A gradient proposal works in units of its noise scale :math:`s`: with the
drift :math:`G = (\epsilon / c_n) \nabla L_I / s`, a forward move is
:math:`s (G + Z)` and a backward move :math:`s (-G + \beta Z)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
import math
from typing import Literal, NamedTuple, Protocol

import jax
from jax import random
import jax.numpy as jnp

from numpyro_mhbt.vectors import Vector, dot, normal

Schedule = Callable[[jax.Array], jax.Array]
"""From the number of draws so far, warm-up included, to a value."""


class Knobs(NamedTuple):
    """What a proposal needs to know of the run."""

    step_size: jax.Array
    beta: jax.Array
    c_n: jax.Array
    num_rows: float


class Move(NamedTuple):
    """What chance decides of a move."""

    noise: Vector
    """Z"""
    width: jax.Array
    """Of the noise: 1, or beta of a backward move."""
    forward: jax.Array


class Proposal(Protocol):
    """What the kernel asks of a proposal."""

    @property
    def step_size(self) -> float | Schedule: ...

    @property
    def beta(self) -> float | None: ...

    @property
    def beta_schedule(self) -> BetaSchedule | None: ...

    @property
    def uses_gradient(self) -> bool: ...

    @property
    def target_accept_prob(self) -> float:
        """The acceptance rate, apart from mini-batch noise, at which it works best."""
        ...

    @property
    def max_step_size(self) -> float:
        """Above it a step size has no meaning."""
        ...

    def draw(self, rng_key: jax.Array, like: Vector, knobs: Knobs) -> Move: ...

    def displacement(self, move: Move, grad: Vector, knobs: Knobs) -> Vector: ...

    def log_ratio(
        self, move: Move, grad: Vector, new_grad: Vector, knobs: Knobs
    ) -> jax.Array: ...


@dataclass(frozen=True)
class RandomWalk:
    r"""
    Gaussian random walk, :math:`\theta' = \theta + \delta Z`.

    It needs no gradient, so a step costs one evaluation of the log-density alone.

    :param float step_size: the paper's :math:`\delta`, or a schedule of it (a function
        of the number of draws so far), which is then not adapted.

    >>> RandomWalk(0.1)
    RandomWalk(step_size=0.1)
    """

    step_size: float | Schedule = 1.0

    @property
    def beta(self) -> None:
        return None

    @property
    def beta_schedule(self) -> None:
        return None

    @property
    def uses_gradient(self) -> bool:
        return False

    @property
    def target_accept_prob(self) -> float:
        return 0.3

    @property
    def max_step_size(self) -> float:
        return math.inf

    def __post_init__(self) -> None:
        positive = callable(self.step_size) or self.step_size > 0
        _check(self, "step_size", positive, "positive")

    def draw(self, rng_key: jax.Array, like: Vector, knobs: Knobs) -> Move:
        width = jnp.ones((), like.dtype)
        return Move(normal(rng_key, like), width, jnp.array(True))

    def displacement(self, move: Move, grad: Vector, knobs: Knobs) -> Vector:
        return knobs.step_size * move.noise

    def log_ratio(
        self, move: Move, grad: Vector, new_grad: Vector, knobs: Knobs
    ) -> jax.Array:
        return jnp.zeros((), grad.dtype)  # the walk is symmetric


@dataclass(frozen=True)
class BetaSchedule:
    r"""
    The paper's rule for :math:`\beta`, followed by :class:`RSGLD` once an epoch.

    If more than ``accept_high`` of an epoch's moves were accepted, forward moves are
    tried from where the chain is (``num_probes`` of them, none of them taken). As long
    as more than ``probe_accept`` of these would be accepted, :math:`\beta` falls by a
    share ``change`` of its value, by ``max_change`` in all. If fewer than
    ``accept_low`` were accepted it rises by ``change``. It never falls below 1.

    A chain whose :math:`\beta` still moves has no invariant distribution: this is for
    training networks.

    :param int steps_per_epoch: ``None``: n / m, the steps in which as many rows are
        drawn as there are.

    >>> BetaSchedule().accept_high
    0.4
    """

    accept_high: float = 0.4
    accept_low: float = 0.2
    num_probes: int = 100
    probe_accept: float = 0.7
    change: float = 0.05
    max_change: float = 0.5
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        for name in ("accept_high", "accept_low", "probe_accept"):
            _check(self, name, 0 <= getattr(self, name) <= 1, "in [0, 1]")
        for name in ("change", "max_change"):
            _check(self, name, 0 < getattr(self, name) < 1, "in (0, 1)")
        _check(self, "num_probes", self.num_probes >= 1, "at least 1")
        given = self.steps_per_epoch
        _check(self, "steps_per_epoch", given is None or given >= 1, "at least 1")


@dataclass(frozen=True)
class RSGLD:
    r"""
    Reversible stochastic gradient Langevin dynamics, the paper's proposal.

    A coin decides between a forward and a backward step along the gradient of the
    current batch,

    .. math::
        \theta' = \theta + \epsilon \hat g_I(\theta) + s Z
        \quad\text{or}\quad
        \theta' = \theta - \epsilon \hat g_I(\theta) + s \beta Z,

    and the acceptance ratio uses the density of this mixture.

    :param float step_size: the paper's :math:`\epsilon`, the learning rate of the
        batch's mean gradient; or a schedule of it (a function of the number of draws
        so far), which is then not adapted.
    :param float beta: how much wider the noise of a backward step is, at least 1.
        ``None``: 1; with a ``beta_schedule`` up to ten times the smallest at which
        forward moves from the starting point are accepted as often as it asks.
    :param float forward_prob: chance of a forward step. The paper's coin is fair, 0.5;
        ``benchmarks/proposal_defaults.py`` shows what a fair coin costs.
    :param str noise: ``"matched"``: :math:`s = \sqrt{\epsilon (2 - \epsilon) / c_n}`
        with :math:`\epsilon` at most 1, so that a Gaussian with the covariance of the
        mass matrix is left as it is by moves of any length (at :math:`\epsilon = 1`
        they are independent draws of it); ``"tempered"``:
        :math:`s = \sqrt{2 \epsilon / c_n}`, the Langevin noise of the tempered target,
        to which the former tends for short steps; ``"paper"``: the paper's
        :math:`s = \sqrt{2 \epsilon} / n`, which is far smaller and mixes poorly.
    :param str hastings: ``"exact"``: the normalised mixture density, so that the
        chain leaves its target invariant; ``"paper"``: without the factor
        :math:`\beta^{-d}` of the wider Gaussian, as in the paper's proof and
        experiments. For :math:`\beta > 1` that chain does **not** sample the
        tempered posterior; it is meant for training networks and for reproducing
        the paper.
    :param BetaSchedule beta_schedule: the paper's rule for :math:`\beta` in training.

    >>> RSGLD(step_size=0.05, beta=2.0, noise="paper").hastings
    'exact'
    """

    step_size: float | Schedule = 0.1
    beta: float | None = None
    forward_prob: float = field(default=0.95, kw_only=True)
    noise: Literal["matched", "tempered", "paper"] = field(
        default="matched", kw_only=True
    )
    hastings: Literal["exact", "paper"] = field(default="exact", kw_only=True)
    beta_schedule: BetaSchedule | None = field(default=None, kw_only=True)

    @property
    def uses_gradient(self) -> bool:
        return True

    @property
    def target_accept_prob(self) -> float:
        return 0.45

    @property
    def max_step_size(self) -> float:
        return 1.0 if self.noise == "matched" else math.inf

    def __post_init__(self) -> None:
        step_size = self.step_size
        positive = callable(step_size) or step_size > 0
        _check(self, "step_size", positive, "positive")
        short = callable(step_size) or step_size <= self.max_step_size
        _check(self, "step_size", short, "at most 1 with noise='matched'")
        _check(self, "beta", self.beta is None or self.beta >= 1, "at least 1")
        _check(self, "forward_prob", 0 < self.forward_prob <= 1, "in (0, 1]")
        noises = ("matched", "tempered", "paper")
        _check(self, "noise", self.noise in noises, _CHOICE["noise"])
        _check(
            self, "hastings", self.hastings in ("exact", "paper"), _CHOICE["hastings"]
        )

    def draw(self, rng_key: jax.Array, like: Vector, knobs: Knobs) -> Move:
        key_coin, key_noise = random.split(rng_key)
        forward = random.bernoulli(key_coin, self.forward_prob)
        width = jnp.where(forward, 1.0, knobs.beta).astype(like.dtype)
        return Move(normal(key_noise, like), width, forward)

    def displacement(self, move: Move, grad: Vector, knobs: Knobs) -> Vector:
        scale, gain = self._scales(knobs)
        drift = jnp.where(move.forward, gain, -gain) * grad
        return scale * (drift + move.width * move.noise)

    def log_ratio(
        self, move: Move, grad: Vector, new_grad: Vector, knobs: Knobs
    ) -> jax.Array:
        r"""
        :math:`\log q_{I'}(\theta' \to \theta) - \log q_I(\theta \to \theta')`.

        With the two branches :math:`q = p F + (1 - p) B`, the ratio is
        :math:`w \, F' / F + (1 - w) \, B' / B`, where :math:`w` is the probability
        that the move was forward given where it led. Each of the three logarithms is
        made of inner products of the noise :math:`U`, the drift :math:`G` and
        :math:`G + G'`. The move less the mean of the branch it did not take is
        :math:`U \pm 2 G`, whose square is never taken: a difference of such squares
        would be lost to rounding in high dimension.
        """
        _, gain = self._scales(knobs)
        # Products of gradients, not of drifts: a new vector is a pass over memory.
        noise, both = move.noise, grad + new_grad
        half = 0.5 * gain**2 * dot(both, both)
        if self.forward_prob == 1:
            return -gain * move.width * dot(both, noise) - half
        there, size = dot(grad, noise), dot(grad, grad)
        along = gain * move.width * (there + dot(new_grad, noise))
        shift = 2 * gain**2 * (size + dot(new_grad, grad))
        near = jnp.where(move.forward, along, along - shift)
        far = jnp.where(move.forward, along + shift, along)
        log_forward = -near - half
        narrow = 1 / knobs.beta**2
        log_backward = narrow * (far - half)
        # |far|^2 / beta^2 - |near|^2 of the move itself
        slope = gain * move.width * there
        steep = gain**2 * size
        spread = move.width**2 * dot(noise, noise)
        gap = (narrow - 1) * spread + 4 * jnp.where(
            move.forward, narrow * (slope + steep), slope - steep
        )
        if self.hastings == "exact":
            gap += 2 * grad.size * jnp.log(knobs.beta)
        log_odds = -0.5 * gap + math.log((1 - self.forward_prob) / self.forward_prob)
        return jnp.logaddexp(
            jax.nn.log_sigmoid(-log_odds) + log_forward,
            jax.nn.log_sigmoid(log_odds) + log_backward,
        )

    def _scales(self, knobs: Knobs) -> tuple[jax.Array, jax.Array]:
        """The noise scale s, and the gain that takes a gradient to the drift G."""
        step_size = knobs.step_size
        if self.noise == "matched":
            step_size = jnp.minimum(step_size, self.max_step_size)
            scale = jnp.sqrt(step_size * (2 - step_size) / knobs.c_n)
        elif self.noise == "tempered":
            scale = jnp.sqrt(2 * step_size / knobs.c_n)
        else:
            scale = jnp.sqrt(2 * step_size) / knobs.num_rows
        return scale, step_size / knobs.c_n / scale


class SGLD(RSGLD):
    r"""
    Stochastic gradient Langevin dynamics: the forward branch of :class:`RSGLD` alone.

    :param float step_size: as in :class:`RSGLD`.
    :param str noise: as in :class:`RSGLD`.

    >>> SGLD(0.05).forward_prob
    1.0
    """

    def __init__(
        self,
        step_size: float | Schedule = 0.1,
        noise: Literal["matched", "tempered", "paper"] = "matched",
    ) -> None:
        super().__init__(step_size, 1.0, forward_prob=1.0, noise=noise)


_CHOICE = {
    "noise": "'matched', 'tempered' or 'paper'",
    "hastings": "'exact' or 'paper'",
}


def _check(proposal: object, name: str, ok: bool, what: str) -> None:
    if not ok:
        raise ValueError(
            f"{type(proposal).__name__}: {name} must be {what}, "
            f"got {getattr(proposal, name)!r}."
        )
