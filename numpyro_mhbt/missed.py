"""What an expansion misses: how much over all rows, and of which rows the most."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from numpyro_mhbt.advice import is_near
from numpyro_mhbt.control import Reference
from numpyro_mhbt.disk import files_of
from numpyro_mhbt.passes import by_chunk, cumulants, groups_of, sum_over_rows
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.state import Noise
from numpyro_mhbt.target import Data
from numpyro_mhbt.temperature import NUM_POINTS, Curvature

if TYPE_CHECKING:
    from numpyro_mhbt.prepare import Programs

_TIMES = 8  # as many rows as a batch has
_SHARE = 0.25  # of all rows, above which they are not few
_WIDE = 2.0  # as wide as typical points: few rows may pull far to one side


def mend(
    settings: Settings,
    programs: Programs,
    data: Data,
    z: dict[str, Any],
    reference: Reference,
    curve: Curvature,
    temperature: float,
) -> tuple[Reference, Noise | None]:
    """
    The expansion with the rows that spoil it made part of every step, and its noise.

    If there are too many of them, or none, it is left as it was.
    """

    def noise_of(reference: Reference) -> Noise | None:
        return measure(settings, programs, data, z, reference, curve, temperature)

    def is_good(noise: Noise) -> bool:
        return is_near(settings, float(noise.variance), float(noise.leftover))

    noise = noise_of(reference)
    most = _most_rows(settings, data)
    if noise is None or not most or is_good(noise) or not jnp.isfinite(noise.variance):
        return reference, noise
    rows, left = _most_missed(
        settings, programs, data, z, reference, curve, temperature, most
    )
    if not rows.size:
        return reference, noise
    ((_, n, m),) = data.plates
    loud = left * (n / m - 1) / temperature**2 > settings.target_noise
    count = min(int(np.sum(loud)) + 1, len(rows))
    while True:
        mended = reference._replace(always=jnp.asarray(np.sort(rows[:count])))
        found = noise_of(mended)
        if found is not None and is_good(found):
            return mended, found
        if count == len(rows):
            return reference, noise
        count = min(2 * count, len(rows))


def _most_rows(settings: Settings, data: Data) -> int:
    """How many rows may be part of every step."""
    if len(data.plates) != 1 or data.placement or files_of((data.args, data.kwargs)):
        return 0
    ((_, n, m),) = data.plates
    control = settings.control_variate
    asked = control.exact_rows if control else 0
    return min(_TIMES * m if asked is None else asked, int(_SHARE * n))


def _most_missed(
    settings: Settings,
    programs: Programs,
    data: Data,
    z: dict[str, Any],
    reference: Reference,
    curve: Curvature,
    temperature: float,
    most: int,
) -> tuple[np.ndarray, np.ndarray]:
    """
    The rows of which most is missed, and what is left when they are gone one by one.

    That is the sum of squares over all other rows, at points around the reference.
    """
    center = np.asarray(curve.z)
    around = center + _WIDE * (curve.typical_points(temperature) - center)
    points = jnp.asarray(around, curve.z.dtype)
    (group,) = groups_of(settings.model, data, z)
    rows, squares, everything = np.zeros(0, np.int32), np.zeros(0), 0.0
    for found in by_chunk(
        programs.squares,
        data,
        z,
        reference,
        points,
        group=group,
        what="Rows of which much is missed",
        width=points.shape[1],
    ):
        new_rows, new_squares = (np.asarray(x) for x in found)
        everything += new_squares.sum(dtype=float)
        rows = np.concatenate([rows, new_rows])
        squares = np.concatenate([squares, new_squares])
        first = np.argsort(-squares, kind="stable")[:most]
        rows, squares = rows[first], squares[first]
    # Those that a chunk has had before came with a square of 0.
    rows, squares = rows[squares > 0], squares[squares > 0]
    return rows, everything - np.cumsum(squares)


def measure(
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
    found, dense = [], np.ones(NUM_POINTS, bool)
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
        with np.errstate(invalid="ignore", over="ignore"):
            by_device = cumulants(sums, group[0], temperature)
        # Devices draw apart from each other, so their cumulants add up.
        found.append(np.sum(by_device, axis=0))
        dense &= np.isfinite(sums[..., 0]).all(axis=0)
    if not dense.any():
        return Noise(*jnp.full(2, jnp.inf))
    # No chain goes where there is no density; what else has no value is too large.
    k2, k3, k4 = np.moveaxis(np.sum(found, axis=0)[dense], -1, 0)
    leftover = np.abs(k3) / 6 + np.abs(k4) / 24
    with np.errstate(invalid="ignore"):
        return Noise(*(jnp.asarray(np.quantile(x, 0.9)) for x in (k2, leftover)))
