"""The choice of T: the coldest at which mini-batches are quiet enough."""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import NamedTuple

import jax
from jax import lax
import numpy as np

from numpyro_mhbt.control import Reference, remainder
from numpyro_mhbt.plates import Plate, Rows, pool
from numpyro_mhbt.target import Data, log_terms, noise_variance, total

MAX_DIM = 500
"""Above it a d x d matrix is not formed for the sake of T alone."""
_GRID = 25
_POINTS = 64
_MIN_PRECISION = 0.01


class Curvature(NamedTuple):
    """Gradient and Hessian of the log-posterior at a point, in two parts."""

    z: jax.Array
    hot: tuple[jax.Array, jax.Array]
    """Of what is divided by T: the likelihood, and the prior if it is tempered."""
    cold: tuple[jax.Array, jax.Array]
    """Of what is not: the Jacobian, and the prior if it is not tempered."""

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
        """The way to the mode, and its squared length in standard deviations."""
        grad, hessian = self.at(temperature)
        try:
            np.linalg.cholesky(-hessian)
        except np.linalg.LinAlgError:
            return np.zeros_like(grad), np.inf
        step = np.linalg.solve(-hessian, grad)
        return step, float(step @ grad)

    def spread(self, temperature: float) -> np.ndarray:
        """S with covariance S S' of the Gaussian approximation."""
        values, vectors = np.linalg.eigh(-self.at(temperature)[1])
        return vectors / np.sqrt(np.maximum(np.abs(values), _MIN_PRECISION))

    def typical_points(self, temperature: float) -> np.ndarray:
        """Draws of the Gaussian approximation, always from the same random numbers."""
        unit = np.random.default_rng(0).standard_normal((_POINTS, self.z.size))
        return np.asarray(self.z, float) + unit @ self.spread(temperature).T


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

    def parts(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        terms = log_terms(model, data, unravel(z), rows_used)
        hot, cold = terms.exact, terms.log_det
        if with_rows:
            hot += total(terms.rows)
        return (hot + terms.prior, cold) if temper_prior else (hot, cold + terms.prior)

    grads = jax.jacrev(parts)
    return Curvature(z, *zip(grads(z), jax.jacfwd(grads)(z), strict=True))


def noise_at(
    data: Data,
    points: jax.Array,
    reference: Reference | None,
    *,
    model: Callable,
    unravel: Callable,
) -> jax.Array:
    """Noise variance at each point and T = 1, from a large sample of rows."""
    rows_used = pool(data.plates)

    def rows_at(z: jax.Array) -> Rows:
        return log_terms(model, data, unravel(z), rows_used).rows

    def noise(z: jax.Array) -> jax.Array:
        rows = rows_at(z)
        if reference is not None:
            rows, _ = remainder(rows, rows_at, reference, z)
        return noise_variance(rows)

    return lax.map(noise, points)


def coldest(
    noise: Callable[[np.ndarray], np.ndarray], n: float, target: float
) -> float:
    """
    The smallest T >= 1 at which the noise variance does not exceed the target.

    If there is none, the T of least noise.

    :param noise: noise variances at temperatures.

    >>> coldest(lambda t: 500 / t, n=1e6, target=1.0)
    500.0
    >>> coldest(lambda t: 0.01 * t, n=1e6, target=1.0)
    1.0
    """
    grid = np.geomspace(1, max(n, 2), _GRID)
    found = noise(grid)
    found = np.where(np.isfinite(found), np.maximum(found, 1e-30), np.inf)
    quiet = found <= target
    if not quiet.any():
        return float(grid[np.argmin(found)])
    i = int(np.argmax(quiet))
    if i == 0:
        return 1.0
    if not np.isfinite(found[i - 1]):
        return float(grid[i])
    # Noise is near a power of T: interpolate on logarithmic scales.
    high, low = np.log(found[i - 1] / target), np.log(found[i] / target)
    share = high / (high - low)
    return float(round(math.exp(np.log(grid[i - 1 : i + 1]) @ [1 - share, share]), 6))


def paper_rule(plates: tuple[Plate, ...], n: float) -> float:
    """T for c_n "close to but smaller than sqrt(m)": Remark 1 of the paper."""
    m = sum(plate.subsample_size for plate in plates)
    return n / min(n, 2 / 3 * math.sqrt(m))
