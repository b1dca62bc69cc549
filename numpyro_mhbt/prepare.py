"""What is settled once per run, from the data alone and alike in all chains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np

from numpyro_mhbt.checks import both_views, check_rows, check_start, check_views
from numpyro_mhbt.control import Reference, Taylor
from numpyro_mhbt.mesh import everywhere
from numpyro_mhbt.missed import measure, mend
from numpyro_mhbt.passes import (
    derivatives,
    groups_of,
    moments,
    squares,
    sum_over_rows,
)
from numpyro_mhbt.pilot import settle
from numpyro_mhbt.plates import is_subsampled
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.setup import Look, given_temperature, jit_data, look
from numpyro_mhbt.state import Noise, Setup, Shared
from numpyro_mhbt.target import Data, fingerprint
from numpyro_mhbt.temperature import (
    MAX_DIM,
    NUM_POINTS,
    Curvature,
    coldest,
    curvature,
    noise_at,
    paper_rule,
    temperature_grid,
    unit_points,
)

_PASSES = 8


class Programs:
    """The compiled parts of :func:`prepare`."""

    def __init__(self, settings: Settings) -> None:
        def compiled(fn: Callable, *, quick: bool = True, **fixed: Any) -> Callable:
            def run(data: Data, z: dict[str, Any], *rest: Any, **options: Any) -> Any:
                options |= {"model": settings.model, "unravel": ravel_pytree(z)[1]}
                return fn(data, *rest, **fixed, **options)

            return jit_data(everywhere(run), quick=quick)

        self.look = jit_data(everywhere(partial(look, settings=settings)), quick=True)
        self.views = jit_data(partial(both_views, model=settings.model), quick=True)
        self.fingerprint = jit_data(everywhere(fingerprint), quick=True)
        self.derivatives = compiled(derivatives, quick=False)
        self.moments = compiled(moments, quick=False)
        self.squares = compiled(squares, quick=False)
        self.noise_at = compiled(noise_at, temper_prior=settings.temper_prior)
        self.settle = jit_data(
            everywhere(partial(settle, settings=settings)), quick=True
        )
        self.curvature = compiled(curvature, temper_prior=settings.temper_prior)


def prepare(settings: Settings, programs: Programs, data: Data) -> Setup:
    """Settle what belongs to the target: the reference and the temperature."""
    given = given_temperature(settings, data)
    seen = programs.look(data, jnp.asarray(given or 1.0))
    check_start(seen.finite)
    check_rows(seen.nan_rows)
    data = data._replace(params=seen.params)
    if data.placement is not None:
        check_views(programs.views(data, seen.z))
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
        curve = curve and curve._replace(expanded=True)
    elif reference is not None and given is None and reference.z.size <= MAX_DIM:
        curve = programs.curvature(data, seen.z, reference.z, with_rows=True)
    if curve is not None and not np.isfinite(curve.at(1.0)[1]).all():
        curve = None
    fits, first = True, given or 1.0
    if order and reference is not None and curve is not None:
        reference, noise = mend(
            settings, programs, data, seen.z, reference, curve, first
        )
    if given is None:
        given = paper_rule(data.plates, data.num_rows)
        if curve is not None:
            subtracted = reference if control else None
            cold, fits = _coldest(settings, programs, data, seen, curve, subtracted)
            fits |= order > 0
            given = cold if fits else min(cold, given)
    if order and reference is not None and curve is not None:
        if given != first:
            noise = measure(settings, programs, data, seen.z, reference, curve, given)
        if curve.newton_step(given)[1] == np.inf:
            # There is nothing to expand around.
            noise = Noise(*jnp.full(2, jnp.inf))
    shared = Shared(
        seen.params,
        reference if control else None,
        noise,
        programs.fingerprint(data),
        data.plates,
        data.num_rows,
        data.placement,
    )
    setup = Setup(seen.z, shared, jnp.asarray(given), _spread(curve, given))
    if fits:
        return setup
    given = programs.settle(data, setup, seen.modes)
    return setup._replace(temperature=given, spread=_spread(curve, float(given)))


def _is_close(curve: Curvature, temperature: float) -> bool:
    """Half a standard deviation from the mode per coordinate, and one in none."""
    step, decrement = curve.newton_step(temperature)
    sd = np.linalg.norm(curve.spread(temperature), axis=1)
    return decrement <= step.size / 4 and bool(np.all(np.abs(step) <= sd))


def _spread(curve: Curvature | None, temperature: float) -> jax.Array | None:
    if curve is None:
        return None
    return jnp.asarray(curve.spread(temperature), curve.z.dtype)


def _coldest(
    settings: Settings,
    programs: Programs,
    data: Data,
    seen: Look,
    curve: Curvature,
    reference: Reference | None,
) -> tuple[float, bool]:
    """
    T by the noise at typical points, and whether these are what they are said to be.

    If searches ended in several modes, there are points around each: a chain may be
    in any of them.
    """
    temperatures = temperature_grid(data.num_rows)
    modes = np.asarray(seen.modes, float)
    dim = modes.shape[1]
    points = np.stack([curve.typical_points(t) for t in temperatures])
    by_mode = points.reshape(len(points), len(modes), -1, dim)
    by_mode = by_mode + (modes - modes[0])[:, None]
    flat = np.concatenate([by_mode.reshape(-1, dim), modes[:1]])
    found = programs.noise_at(data, seen.z, jnp.asarray(flat, curve.z.dtype), reference)
    noise, hot, cold = (np.asarray(x, np.float64) for x in found)
    # Near the mean of a chi-square variable, and no outlier decides.
    noise = np.quantile(noise[:-1].reshape(len(points), -1), 0.65, axis=1)
    noise /= temperatures**2
    temperature = coldest(temperatures, noise, settings.target_noise)
    if not np.any(noise <= settings.target_noise):
        # Loud at every T: chains are hardly where these points are.
        return temperature, False

    nearest = np.argmin(np.abs(np.log(temperatures / temperature)))
    around = np.arange(NUM_POINTS // len(modes)) + nearest * NUM_POINTS
    expected = 0.5 * np.sum(unit_points(dim)[: len(around)] ** 2, axis=1)
    with np.errstate(invalid="ignore"):  # no density: no fit
        drop = (hot[-1] - hot[around]) / temperatures[nearest]
        drop += cold[-1] - cold[around]
        fit = np.median(drop / expected)
    return temperature, bool(0.5 < fit < 2)


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
        # Twice without a mode nearby in a space where each pass takes long.
        lost = (
            at.size > MAX_DIM
            and best is not None
            and bool(np.isinf([decrement, best[2]]).all())
        )
        if best is None or decrement <= best[2]:
            best = reference, curve, decrement
        given = control.ref_params is not None
        if given or lost or not step.any() or _is_close(curve, temperature):
            break
        at = jnp.asarray(np.asarray(at) + step, at.dtype)
    assert best is not None
    return best[:2]
