"""The choice of T: the coldest at which mini-batches are quiet enough."""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import NamedTuple

import jax
from jax import lax
import numpy as np

from numpyro_mhbt.control import Reference, remainder
from numpyro_mhbt.disk import fetch
from numpyro_mhbt.mesh import across
from numpyro_mhbt.plates import Plate, pool
from numpyro_mhbt.target import Data, Terms, log_terms, noise_variance, total

MAX_DIM = 500
"""Above it a d x d matrix is not formed for the sake of T alone."""
_GRID = 25
NUM_POINTS = 64
_MIN_PRECISION = 0.01  # less is as good as flat, where rows are but a sample
_ROUNDING = 1e-7  # of the largest precision


class Curvature(NamedTuple):
    """Gradient and Hessian of the log-posterior at a point, in two parts."""

    z: jax.Array
    hot: tuple[jax.Array, jax.Array]
    """Of what is divided by T: the likelihood, and the prior if it is tempered."""
    cold: tuple[jax.Array, jax.Array]
    """Of what is not: the Jacobian, and the prior if it is not tempered."""
    expanded: bool = False
    """Whether a control variate is expanded here, so that draws stay nearby."""

    def plus(self, likelihood: tuple[np.ndarray, np.ndarray]) -> Curvature:
        """With gradient and Hessian of the rows added."""
        pairs = zip(self.hot, likelihood, strict=True)
        return self._replace(hot=tuple(np.asarray(a, float) + b for a, b in pairs))

    def at(self, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Gradient and Hessian of the tempered log-posterior."""
        parts = zip(self.hot, self.cold, strict=True)
        grad, hessian = (np.asarray(h, float) / temperature + c for h, c in parts)
        return grad, hessian

    def newton_step(self, temperature: float) -> tuple[np.ndarray, float]:
        """
        The way to the mode, and its squared length in standard deviations.

        Where the log-density is not concave the way is still up, at most 1 along each
        axis, and its length infinite: there is no mode nearby to measure it by.
        """
        grad, hessian = self.at(temperature)
        if not (np.isfinite(grad).all() and np.isfinite(hessian).all()):
            return np.zeros_like(grad), np.inf
        values, vectors = np.linalg.eigh(-hessian)
        along = vectors.T @ grad / np.maximum(np.abs(values), 1e-300)
        if values[0] > 0:
            return vectors @ along, float(along**2 @ values)
        return vectors @ np.clip(along, -1, 1), np.inf

    def spread(self, temperature: float) -> np.ndarray:
        """S with covariance S S' of the Gaussian approximation."""
        values, vectors = np.linalg.eigh(-self.at(temperature)[1])
        least = _MIN_PRECISION
        if self.expanded and values[0] > 0:
            # Parameters in small units are wide, and their mass matrix must know it.
            least = min(least, _ROUNDING * values[-1])
        return vectors / np.sqrt(np.maximum(np.abs(values), least))

    def typical_points(self, temperature: float) -> np.ndarray:
        """Draws of the Gaussian approximation, always from the same random numbers."""
        spread = self.spread(temperature)
        return np.asarray(self.z, float) + unit_points(self.z.size) @ spread.T


def unit_points(dim: int) -> np.ndarray:
    """Standard normal points, always the same."""
    return np.random.default_rng(0).standard_normal((NUM_POINTS, dim))


def curvature(
    data: Data,
    z: jax.Array,
    *,
    model: Callable,
    unravel: Callable,
    temper_prior: bool,
    with_rows: bool,
) -> Curvature:
    """:class:`Curvature` at ``z``: that of rows, if asked, from a sample of them."""
    rows_used = pool(data.plates)
    data = fetch(data, rows_used)

    def parts(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        terms = log_terms(model, data, unravel(z), rows_used)
        return _parts(terms, temper_prior, with_rows)

    grads = jax.jacrev(parts)
    found = across(data, (grads(z), jax.jacfwd(grads)(z)))
    hot, cold = zip(*found, strict=True)
    return Curvature(z, hot, cold)


def _parts(
    terms: Terms, temper_prior: bool, with_rows: bool
) -> tuple[jax.Array, jax.Array]:
    """What of a log-density is divided by T, and what is not."""
    hot, cold = terms.exact, terms.log_det
    if with_rows:
        hot += total(terms.rows)
    return (hot + terms.prior, cold) if temper_prior else (hot, cold + terms.prior)


def noise_at(
    data: Data,
    points: jax.Array,
    reference: Reference | None,
    *,
    model: Callable,
    unravel: Callable,
    temper_prior: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """
    Noise variance at each point and T = 1, from a large sample of rows.

    With it the two parts of the log-density, that divided by T and that which is not.
    """
    rows_used = pool(data.plates)
    data = fetch(data, rows_used)

    def terms_at(z: jax.Array) -> Terms:
        return log_terms(model, data, unravel(z), rows_used)

    def at(z: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        terms = terms_at(z)
        rows = terms.rows
        if reference is not None:
            rows, _ = remainder(rows, lambda z: terms_at(z).rows, reference, z)
            rows = reference.without(rows, rows_used)
        return noise_variance(rows), *_parts(terms, temper_prior, with_rows=True)

    return across(data, lax.map(at, points))


def temperature_grid(n: float) -> np.ndarray:
    """Temperatures to try, from 1 to n."""
    return np.geomspace(1, max(n, 2), _GRID)


def coldest(temperatures: np.ndarray, noise: np.ndarray, target: float) -> float:
    """
    The smallest T at which the noise variance does not exceed the target.

    If there is none, the T of least noise.

    :param temperatures: rising.
    :param noise: noise variance at each.

    >>> grid = temperature_grid(1e6)
    >>> coldest(grid, 500 / grid, target=1.0)
    500.0
    >>> coldest(grid, 0.01 * grid, target=1.0)
    1.0
    """
    noise = np.where(np.isfinite(noise), np.maximum(noise, 1e-30), np.inf)
    quiet = noise <= target
    if not quiet.any():
        return float(temperatures[np.argmin(noise)])
    i = int(np.argmax(quiet))
    if i == 0:
        return float(temperatures[0])
    if not np.isfinite(noise[i - 1]):
        return float(temperatures[i])
    # Noise is near a power of T: interpolate on logarithmic scales.
    high, low = np.log(noise[i - 1] / target), np.log(noise[i] / target)
    share = high / (high - low)
    between = np.log(temperatures[i - 1 : i + 1]) @ [1 - share, share]
    return float(round(math.exp(between), 6))


def paper_rule(plates: tuple[Plate, ...], n: float) -> float:
    """T for c_n "close to but smaller than sqrt(m)": Remark 1 of the paper."""
    m = sum(plate.subsample_size for plate in plates)
    return n / min(n, 2 / 3 * math.sqrt(m))
