"""What is settled once per run, from the data alone and alike in all chains."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from numpyro_mhbt.checks import check_rows, check_start
from numpyro_mhbt.control import Reference, Taylor
from numpyro_mhbt.passes import (
    cumulants,
    derivatives,
    groups_of,
    moments,
    sum_over_rows,
)
from numpyro_mhbt.plates import Plate, is_subsampled
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.setup import Look, given_temperature, jit_data, look
from numpyro_mhbt.target import Data, fingerprint
from numpyro_mhbt.temperature import (
    MAX_DIM,
    Curvature,
    coldest,
    curvature,
    noise_at,
    paper_rule,
)

_PASSES = 4


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


class Setup(NamedTuple):
    """A valid point, and what chains share."""

    z: dict[str, Any]
    shared: Shared
    temperature: jax.Array
    spread: jax.Array | None
    """S with covariance S S' of a Gaussian approximation at the reference, if known."""


class Programs:
    """The compiled parts of :func:`prepare`."""

    def __init__(self, settings: Settings) -> None:
        def compiled(fn: Callable, **fixed: Any) -> Callable:
            def run(data: Data, z: dict[str, Any], *rest: Any, **options: Any) -> Any:
                options |= {"model": settings.model, "unravel": ravel_pytree(z)[1]}
                return fn(data, *rest, **fixed, **options)

            return jit_data(run)

        self.look = jit_data(partial(look, settings=settings))
        self.fingerprint = jit_data(fingerprint)
        self.derivatives = compiled(derivatives)
        self.moments = compiled(moments)
        self.noise_at = compiled(noise_at)
        self.curvature = compiled(curvature, temper_prior=settings.temper_prior)


def prepare(settings: Settings, programs: Programs, data: Data) -> Setup:
    """Settle what belongs to the target: the reference and the temperature."""
    given = given_temperature(settings, data)
    seen = programs.look(data, jnp.asarray(given or 1.0))
    check_start(seen.finite)
    check_rows(seen.nan_rows)
    data = data._replace(params=seen.params)
    control = settings.control_variate if is_subsampled(data.plates) else None
    order = control.order if control else 0
    reference = None if seen.modes is None else Reference(seen.modes[0])
    curve = noise = None
    if control is not None and order:
        # An expansion serves one mode, and chains start there.
        seen = seen._replace(modes=seen.modes[:1])
        reference, curve = expand(
            settings, programs, data, seen.z, seen.modes[0], control, given or 1.0
        )
    elif reference is not None and given is None and reference.z.size <= MAX_DIM:
        curve = programs.curvature(data, seen.z, reference.z, with_rows=True)
    if curve is not None and not np.isfinite(curve.at(1.0)[1]).all():
        curve = None
    if given is None:
        given = paper_rule(data.plates, data.num_rows)
        if curve is not None:
            subtracted = reference if control else None
            given = coldest(
                partial(_noise, programs, data, seen, curve, subtracted),
                data.num_rows,
                settings.target_noise,
            )
    if order and reference is not None and curve is not None:
        noise = _measure(settings, programs, data, seen.z, reference, curve, given)
    shared = Shared(
        seen.params,
        reference if control else None,
        noise,
        programs.fingerprint(data),
        data.plates,
        data.num_rows,
    )
    spread = None if curve is None else jnp.asarray(curve.spread(given), curve.z.dtype)
    return Setup(seen.z, shared, jnp.asarray(given), spread)


def _noise(
    programs: Programs,
    data: Data,
    seen: Look,
    curve: Curvature,
    reference: Reference | None,
    temperatures: np.ndarray,
) -> np.ndarray:
    """
    Noise variance at typical points of each temperature.

    If searches ended in several modes, there are points around each: a chain may be
    in any of them.
    """
    modes = np.asarray(seen.modes, float)
    points = np.stack([curve.typical_points(t) for t in temperatures])
    by_mode = points.reshape(len(points), len(modes), -1, points.shape[-1])
    by_mode = by_mode + (modes - modes[0])[:, None]
    flat = jnp.asarray(by_mode.reshape(-1, points.shape[-1]), curve.z.dtype)
    noise = np.asarray(programs.noise_at(data, seen.z, flat, reference), np.float64)
    # Near the mean of a chi-square variable, and no outlier decides.
    noise = np.quantile(noise.reshape(len(points), -1), 0.65, axis=1)
    return noise / temperatures**2


def expand(
    settings: Settings,
    programs: Programs,
    data: Data,
    z: dict[str, Any],
    at: jax.Array,
    control: Taylor,
    temperature: float,
) -> tuple[Reference, Curvature | None]:
    """
    The full-data sums of the expansion, and the curvature of the log-posterior there.

    Where the search has left the reference far from the mode, Newton steps take it
    closer: order 2 has all that they need.
    """
    groups = groups_of(settings.model, data, z)
    best = None
    for _ in range(_PASSES):
        sums = [
            sum_over_rows(
                partial(programs.derivatives, order=control.order),
                data,
                z,
                at,
                group=group,
                what="Taylor expansion",
                width=at.size,
            )
            for group in groups
        ]
        total = jax.tree.map(lambda *x: np.sum(x, axis=0), *sums)
        if not all(np.isfinite(x).all() for x in total):
            if best is not None:
                break
            raise ValueError(
                "The log-likelihood has no finite derivatives at the reference point "
                f"of Taylor(order={control.order}). Give other `ref_params`, or use "
                "`Taylor(order=0)`."
            )
        reference = Reference(at, *(jnp.asarray(x, at.dtype) for x in total))
        if control.order == 1:
            if at.size > MAX_DIM:
                return reference, None
            return reference, programs.curvature(data, z, at, with_rows=True)
        curve = programs.curvature(data, z, at, with_rows=False).plus(total)
        step, decrement = curve.newton_step(temperature)
        if best is None or decrement < best[2]:
            best = reference, curve, decrement
        if control.ref_params is not None or not at.size / 4 < decrement < np.inf:
            break
        at = jnp.asarray(np.asarray(at) + step, at.dtype)
    assert best is not None
    return best[:2]


def _measure(
    settings: Settings,
    programs: Programs,
    data: Data,
    z: dict[str, Any],
    reference: Reference,
    curve: Curvature,
    temperature: float,
) -> Noise | None:
    """
    The noise at typical points from all rows: a batch does not show what few rows do.

    The log of E exp(noise) is v/2 and then k3/6 + k4/24, which nothing corrects.
    """
    found = []
    for group in groups_of(settings.model, data, z):
        if len(group) > 1:
            return None
        points = jnp.asarray(curve.typical_points(temperature), curve.z.dtype)
        sums = sum_over_rows(
            programs.moments,
            data,
            z,
            reference,
            points,
            group=group,
            what="Noise of the expansion",
            width=points.shape[1],
        )
        found.append(cumulants(sums, group[0], temperature))
    k2, k3, k4 = np.moveaxis(np.sum(found, axis=0), -1, 0)
    leftover = np.abs(k3) / 6 + np.abs(k4) / 24
    return Noise(*(jnp.asarray(np.quantile(x, 0.9)) for x in (k2, leftover)))
