r"""
From a NumPyro model to its tempered log-density on a mini-batch.

.. math:: L_I(\theta) = \frac{1}{T} \Bigl[\log \pi_0(\theta) + n \hat\mu_I(\theta)\Bigr]
    + \log \left|\frac{d\theta}{dz}\right|

The tempered posterior lives in the constrained space, so the Jacobian of the map from
unconstrained coordinates z is never divided by T.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import random
import jax.numpy as jnp
from numpyro.handlers import seed, substitute
from numpyro.infer.util import _unconstrain_reparam, compute_log_probs

from numpyro_mhbt.plates import Batch, Plate, plates_of, with_rows
from numpyro_mhbt.step import Point

Rows = dict[tuple[Plate, ...], jax.Array]
"""Log-likelihood by row, one axis for each plate; sites that share plates added up."""


class Terms(NamedTuple):
    """The parts of a model's log-density on a batch, none of them tempered."""

    prior: jax.Array
    """Latent sites, and ``factor`` outside the subsampled plates."""
    exact: jax.Array
    """Observed sites outside the subsampled plates."""
    log_det: jax.Array
    """log |dθ/dz|"""
    rows: Rows


class Data(NamedTuple):
    """The arguments of a run, and the plates they make."""

    args: tuple
    kwargs: dict[str, Any]
    plates: tuple[Plate, ...]
    num_rows: float
    """The paper's n."""
    params: dict[str, Any]
    """Values of ``param`` and ``mutable`` sites, which are not sampled."""


def site_log_probs(
    model: Callable, data: Data, z: dict[str, Any], batch: Batch
) -> tuple[dict[str, jax.Array], dict[str, dict[str, Any]]]:
    """Log-density of each site at unconstrained ``z`` on ``batch``, and its trace."""
    model = substitute(with_rows(model, batch), data=data.params)
    model = substitute(model, substitute_fn=partial(_unconstrain_reparam, z))
    return compute_log_probs(
        seed(model, random.key(0)), data.args, data.kwargs, {}, sum_log_prob=False
    )


def log_terms(model: Callable, data: Data, z: dict[str, Any], batch: Batch) -> Terms:
    """The log-density at unconstrained ``z`` on ``batch``, sorted into its parts."""
    log_probs, sites = site_log_probs(model, data, z, batch)
    jacobians = {f"_{name}_log_det" for name in z}
    prior = exact = log_det = jnp.zeros(())
    rows: Rows = {}
    for name, log_prob in log_probs.items():
        site = sites[name]
        plates = plates_of(site, data.plates)
        if name in jacobians:
            log_det += jnp.sum(log_prob)
        elif plates:
            values = by_row(site, log_prob, plates)
            rows[plates] = rows[plates] + values if plates in rows else values
        elif site["is_observed"] and not site["infer"].get("is_auxiliary"):
            exact += jnp.sum(log_prob)
        else:
            prior += jnp.sum(log_prob)
    return Terms(prior, exact, log_det, rows)


def by_row(
    site: dict[str, Any], log_prob: jax.Array, plates: tuple[Plate, ...]
) -> jax.Array:
    """One axis per subsampled plate, without the n / m of those plates."""
    dims = {frame.name: frame.dim for frame in site["cond_indep_stack"]}
    axes = [log_prob.ndim + dims[plate.name] for plate in plates]
    others = tuple(a for a in range(log_prob.ndim) if a not in axes)
    ordered = jnp.transpose(log_prob, (*axes, *others))
    return jnp.sum(ordered, tuple(range(len(axes), log_prob.ndim))) / _weight(plates)


def _weight(plates: tuple[Plate, ...]) -> float:
    return math.prod(plate.weight for plate in plates)


def total(rows: Rows) -> jax.Array:
    """The estimate of the log-likelihood of all rows, unbiased over batches."""
    return sum(
        (_weight(plates) * jnp.sum(values) for plates, values in rows.items()),
        jnp.zeros(()),
    )


def noise_variance(rows: Rows) -> jax.Array:
    """
    Variance of :func:`total` over batches, estimated from this batch.

    For each plate (1 - m/n) n² s² / m, with s² the sample variance of what its rows
    contribute: the variance of a mean drawn without replacement.
    """
    margins: dict[Plate, jax.Array] = {}
    for plates, values in rows.items():
        for axis, plate in enumerate(plates):
            others = tuple(a for a in range(values.ndim) if a != axis)
            margin = jnp.sum(values, others) * (_weight(plates) / plate.weight)
            margins[plate] = margins.get(plate, 0.0) + margin
    variance = jnp.zeros(())
    for (_, n, m), margin in margins.items():
        if 1 < m < n:
            factor = (1 - m / n) * float(n) ** 2 / m
            variance += factor * jnp.var(margin, ddof=1)
    return variance


def num_rows(sites: dict[str, dict[str, Any]], plates: tuple[Plate, ...]) -> float:
    """
    The paper's n: rows of the likelihood, over all combinations of subsampled plates.

    A model without a subsampled plate has as many rows as it has observed values.
    """
    observed = [
        site
        for site in sites.values()
        if site["type"] == "sample" and site["is_observed"]
    ]
    groups = {plates_of(site, plates) for site in observed} - {()}
    if groups:
        return float(sum(math.prod(p.size for p in group) for group in groups))
    return float(max(sum(math.prod(site["fn"].batch_shape) for site in observed), 1))


def _less(row: jax.Array, at_reference: jax.Array) -> jax.Array:
    """The difference, or the row itself where the reference has no density."""
    return row - jnp.where(jnp.isfinite(at_reference), at_reference, 0.0)


def make_evaluate(
    model: Callable,
    data: Data,
    unravel: Callable[[jax.Array], dict[str, Any]],
    temperature: jax.Array,
    reference: jax.Array | None,
    *,
    temper_prior: bool,
    gradient: bool,
) -> Callable[[jax.Array, Batch], Point]:
    """
    θ and batch to the tempered log-density, its gradient and its noise.

    :param reference: θ_ref of the control variate of order 0: l_i(θ_ref) is subtracted
        from each row. That adds a constant to the log-density of all rows but takes
        the part of the noise away that does not depend on θ.
    """

    def objective(z: jax.Array, batch: Batch) -> tuple[jax.Array, Point]:
        terms = log_terms(model, data, unravel(z), batch)
        rows = terms.rows
        if reference is not None:
            at_reference = log_terms(model, data, unravel(reference), batch).rows
            rows = jax.tree.map(_less, rows, at_reference)
        likelihood = terms.exact + total(rows)
        if temper_prior:
            value = (terms.prior + likelihood) / temperature + terms.log_det
        else:
            value = terms.prior + likelihood / temperature + terms.log_det
        energy = -(terms.prior + terms.exact + total(terms.rows) + terms.log_det)
        noise = noise_variance(rows) / temperature**2
        return value, Point(z, batch, value, jnp.zeros_like(z), energy, noise)

    def evaluate(z: jax.Array, batch: Batch) -> Point:
        if not gradient:
            return objective(z, batch)[1]
        (_, point), grad = jax.value_and_grad(objective, has_aux=True)(z, batch)
        return point._replace(grad=grad)

    return evaluate
