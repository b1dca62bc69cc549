"""The state of a chain, and what chains share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_mhbt.adaptation import WarmupState
from numpyro_mhbt.control import Reference
from numpyro_mhbt.plates import Batch, Plate
from numpyro_mhbt.step import Point
from numpyro_mhbt.vectors import Blocks, Vector, as_vector

if TYPE_CHECKING:
    from numpyro_mhbt.mesh import Placement


class Noise(NamedTuple):
    """Of the estimate, from all rows: not exceeded at nine of ten typical points."""

    variance: jax.Array
    leftover: jax.Array
    """Error of the log-density that no correction by the variance mends."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shared:
    """What a chain carries along of :class:`Setup`."""

    params: dict[str, Any]
    """Values of ``param`` and ``mutable`` sites."""
    reference: Reference | None
    """Of the control variate."""
    noise: Noise | None
    """For control variates of order 1 and 2, which stand or fall with it."""
    fingerprint: jax.Array
    """Of the data that the sums in ``reference`` belong to."""
    plates: tuple[Plate, ...] = field(metadata={"static": True})
    num_rows: float = field(metadata={"static": True})
    placement: Placement | None = field(default=None, metadata={"static": True})
    """Where rows are, if they are spread over devices."""


class Setup(NamedTuple):
    """A valid point, and what chains share."""

    z: dict[str, Any]
    shared: Shared
    temperature: jax.Array
    spread: jax.Array | None
    """S with covariance S S' of a Gaussian approximation at the reference, if known."""


class MHBTState(NamedTuple):
    """
    State of :class:`~numpyro_mhbt.MHBT`. Each numeric field can be asked for by name
    in the ``extra_fields`` of :meth:`~numpyro.infer.mcmc.MCMC.run`.

     - **i** - number of draws so far, warm-up included.
     - **z** - latent values in unconstrained space.
     - **batch** - rows of each subsampled plate that ``z`` was accepted with.
     - **log_density** - tempered log-density of ``z`` on its batch, less the control
       variate, up to a constant.
     - **z_grad** - its gradient, flat; by site where that is faster. Like
       ``log_density`` unknown after a rejection with ``on_reject="refresh"``.
     - **potential_energy** - minus the log-density of the full, untempered posterior as
       estimated on the batch.
     - **noise_variance** - variance of ``log_density`` over batches, as estimated on
       the batch. Near 1 is good.
     - **accept_prob** - acceptance probability, averaged over the steps of the draw; 0
       of a step that does not move, after a rejection with ``on_reject="refresh"``.
     - **mean_accept_prob** - its running mean since the start of the phase, over
       65536 draws at most.
     - **mean_diverging** - share of proposals that diverged, likewise (in warm-up over
       its last 100 draws).
     - **mean_noise_variance** - ``noise_variance`` on fresh batches: a geometric mean
       over the phase (in warm-up over its last steps). The chain lingers on batches
       that flatter it, so this is the fairer figure.
     - **accepted** - number of accepted steps: 0 or 1 with ``steps_per_draw=1``.
     - **diverging** - whether a proposal's value was not finite, or its gradient not a
       number (it was rejected).
     - **forward** - 1 if the last proposal was a forward move, 0 if backward, and -1
       if the last step did not move.
     - **temperature** - T = n / c_n.
     - **step_size**, **beta** - as used for the next draw.
     - **epoch_accept_prob** - running mean of ``accept_prob`` in the present epoch of a
       :class:`~numpyro_mhbt.BetaSchedule`; otherwise 0.
     - **adapt_state** - what warm-up has learnt.
     - **shared** - what all chains have in common: the reference, the plates.
     - **rng_key** - random number generator key.
    """

    i: jax.Array
    z: dict[str, Any]
    batch: Batch
    log_density: jax.Array
    z_grad: Vector
    potential_energy: jax.Array
    noise_variance: jax.Array
    accept_prob: jax.Array
    mean_accept_prob: jax.Array
    mean_diverging: jax.Array
    mean_noise_variance: jax.Array
    accepted: jax.Array
    diverging: jax.Array
    forward: jax.Array
    temperature: jax.Array
    step_size: jax.Array
    beta: jax.Array
    epoch_accept_prob: jax.Array
    adapt_state: WarmupState
    shared: Shared
    rng_key: jax.Array


def to_point(state: MHBTState) -> tuple[Point, Callable]:
    """The state as the step sees it, and the way back from flat to named values."""
    point = Point(
        as_vector(state.z, state.z_grad),
        state.batch,
        state.log_density,
        state.z_grad,
        state.potential_energy,
        state.noise_variance,
    )
    return point, unraveller(state.z)


def unraveller(z: dict[str, Any]) -> Callable[[Vector], dict[str, Any]]:
    """From a vector to values named like ``z``."""
    unravel = ravel_pytree(z)[1]
    return lambda vector: vector.tree if isinstance(vector, Blocks) else unravel(vector)


def num_params(state: MHBTState) -> int:
    """Of a chain, unconstrained."""
    values = sum(leaf.size for leaf in jax.tree.leaves(state.z))
    return values // jnp.size(state.i)


def from_point(point: Point, unravel: Callable) -> dict[str, Any]:
    """The fields of the state that belong to a point."""
    return {
        "z": unravel(point.z),
        "batch": point.batch,
        "log_density": point.value,
        "z_grad": point.grad,
        "potential_energy": point.potential_energy,
        "noise_variance": point.noise_variance,
    }
