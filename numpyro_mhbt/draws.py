"""Draws of single coordinates, as pictures show them: their names, modes and spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.scipy.stats import gaussian_kde
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

SHOWN = 5000
"""Draws that a picture shows."""
_LOWER_MODE = 0.1  # of the height of the other; less is a tail


def draws_of(data: Any) -> dict[str, np.ndarray]:
    """Of a finished run or an ArviZ object, by chain."""
    if isinstance(data, MCMC):
        samples = data.get_samples(group_by_chain=True)
        return {name: np.asarray(x) for name, x in samples.items()}
    return {name: x.values for name, x in data["posterior"].data_vars.items()}


def scalars(
    draws: Mapping[str, np.ndarray], var_names: Sequence[str] | None, most: int
) -> dict[str, np.ndarray]:
    """
    Coordinates, by the names that ArviZ gives them.

    :param var_names: sites or coordinates. ``None``: the first ``most`` coordinates.
    """
    sites: Sequence[str] = list(draws) if var_names is None else var_names
    found = {}
    for name in sites:
        site, index = place(name)
        shape = draws[site].shape[2:] if site in draws else ()
        within = len(index) == len(shape) and np.all(np.less(index, shape))
        if site not in draws or (index and not within):
            raise ValueError(f"There is no coordinate '{name}' in {list(draws)}.")
        for one in [index] if index else np.ndindex(shape):
            label = f"{site}[{', '.join(map(str, one))}]" if one else site
            found[label] = draws[site][(..., *one)]
            if var_names is None and len(found) == most:
                return found
    return found


def place(name: str) -> tuple[str, Any]:
    """
    Site and index of a coordinate.

    >>> place("w[0, 1]")
    ('w', (0, 1))
    """
    site, _, index = name.rstrip("]").partition("[")
    return site, tuple(int(i) for i in index.split(",") if i)


def thinned(draws: np.ndarray, about: int = SHOWN) -> np.ndarray:
    """Every so many of them, that about as many as are asked for are left."""
    return draws[:: max(1, len(draws) // about)]


def spread(draws: np.ndarray) -> tuple[float, float]:
    """Standard deviation, and the relative error of it."""
    squares = (draws - draws.mean()) ** 2
    sd = squares.mean() ** 0.5
    error = squares.std() / _ess(squares) ** 0.5 / (2 * sd)
    return sd, error / sd


def _ess(draws: np.ndarray) -> float:
    return min(float(effective_sample_size(draws)), draws.size)


def valley(draws: np.ndarray) -> tuple[float, float]:
    """Where the density is lowest between two modes, and how low: 1 if nowhere."""
    some = thinned(draws.ravel())
    grid = np.linspace(some.min(), some.max(), 256)
    if some.min() == some.max():
        return float(grid[0]), 1.0
    # Wide enough for what the draws are worth, so that a chain that lingers is no mode;
    # yet narrower than the rule for one mode, which would blur two.
    width = 0.5 * np.clip(np.nan_to_num(_ess(draws)), 4, draws.size) ** -0.2
    density = np.asarray(gaussian_kde(some, bw_method=width)(grid))
    left = np.maximum.accumulate(density)
    right = np.maximum.accumulate(density[::-1])[::-1]
    lower = np.minimum(left, right)
    depth = np.where(lower > _LOWER_MODE * density.max(), density / lower, 1.0)
    lowest = int(np.argmin(depth))
    return float(grid[lowest]), float(depth[lowest])


def count_moves(draws: np.ndarray, split: float) -> int:
    """From beyond half way to one mode to beyond half way to the other, by chain."""
    above = draws > split
    if above.all() or not above.any():
        return 0
    low, high = ((split + np.median(draws[side])) / 2 for side in (~above, above))
    moves = 0
    for chain in draws:
        reached = chain[(chain < low) | (chain > high)] > split
        moves += int(np.sum(reached[1:] != reached[:-1]))
    return moves
