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
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import infer_config, seed, substitute
from numpyro.infer.util import _unconstrain_reparam, compute_log_probs

from numpyro_mhbt.control import Reference, remainder
from numpyro_mhbt.disk import fetch, files_of
from numpyro_mhbt.mesh import Placement, across, own_share
from numpyro_mhbt.plates import Batch, Plate, Rows, plates_of, with_rows
from numpyro_mhbt.step import Point
from numpyro_mhbt.vectors import Vector, as_vector, flatten


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
    placement: Placement | None = None
    """Where rows are, if they are spread over devices."""
    axes: tuple[str, ...] = ()
    """Of the mesh, if these are the rows of one device."""


def fingerprint(data: Data) -> jax.Array:
    """A number that tells these data from others, by a few bytes of each array."""
    code = jnp.zeros((), jnp.uint32)
    arguments = data.args, data.kwargs
    some_rows = [
        file[jnp.asarray(np.linspace(0, len(file) - 1, 64).astype(np.int32))]
        for file in files_of(arguments)
    ]
    for leaf in jax.tree.leaves((arguments, some_rows)):
        if (
            isinstance(leaf, jax.Array)
            and leaf.ndim
            and leaf.size
            and leaf.dtype.kind in "biuf"
        ):
            places = np.linspace(0, leaf.size - 1, 64).astype(int)
            some = leaf[np.unravel_index(places, leaf.shape)]
            some = some.astype(jnp.uint8) if leaf.dtype == bool else some
            bits = lax.bitcast_convert_type(some, jnp.uint8).ravel().astype(jnp.uint32)
            code = 31 * code + jnp.sum(
                bits * jnp.arange(1, bits.size + 1, dtype=bits.dtype)
            )
    if data.axes:
        code = across(data, code * (2 * lax.axis_index(data.axes) + 1).astype("uint32"))
    return code


def site_log_probs(
    model: Callable, data: Data, z: dict[str, Any], batch: Batch
) -> tuple[dict[str, jax.Array], dict[str, dict[str, Any]]]:
    """Log-density of each site at unconstrained ``z`` on ``batch``, and its trace."""
    model = substitute(with_rows(model, batch), data=data.params)
    model = substitute(model, substitute_fn=partial(_constrain, z))
    return compute_log_probs(
        seed(model, random.key(0)), data.args, data.kwargs, {}, sum_log_prob=False
    )


def _constrain(z: dict[str, Any], site: dict[str, Any]) -> Any:
    """NumPyro's map, its Jacobian marked: a handler such as ``scope`` renames it."""
    with infer_config(config_fn=lambda _: {"is_jacobian": True}):
        return _unconstrain_reparam(z, site)


def log_terms(model: Callable, data: Data, z: dict[str, Any], batch: Batch) -> Terms:
    """
    The log-density at unconstrained ``z`` on ``batch``, sorted into its parts.

    On one of several devices what stands outside the plates counts by its share.
    """
    log_probs, sites = site_log_probs(model, data, z, batch)
    prior = exact = log_det = jnp.zeros(())
    rows: Rows = {}
    for name, log_prob in log_probs.items():
        site = sites[name]
        plates = plates_of(site, data.plates)
        if site["infer"].get("is_jacobian"):
            log_det += jnp.sum(log_prob)
        elif plates and site["is_observed"]:
            values = by_row(site, log_prob, plates)
            rows[plates] = rows[plates] + values if plates in rows else values
        elif site["is_observed"] and not site["infer"].get("is_auxiliary"):
            exact += jnp.sum(log_prob)
        else:
            prior += jnp.sum(log_prob)
    if data.axes:
        alike = own_share(data)
        prior, exact, log_det = prior * alike, exact * alike, log_det * alike
    return Terms(prior, exact, log_det, rows)


def by_row(
    site: dict[str, Any], log_prob: jax.Array, plates: tuple[Plate, ...]
) -> jax.Array:
    """One axis per subsampled plate, without the n / m of those plates."""
    frames = {frame.name: frame for frame in site["cond_indep_stack"]}
    axes = [log_prob.ndim + frames[plate.name].dim for plate in plates]
    others = tuple(a for a in range(log_prob.ndim) if a not in axes)
    ordered = jnp.transpose(log_prob, (*axes, *others))
    weight = math.prod(plate.size / frames[plate.name].size for plate in plates)
    return jnp.sum(ordered, tuple(range(len(axes), log_prob.ndim))) / weight


def total(rows: Rows) -> jax.Array:
    """The estimate of the log-likelihood of all rows, unbiased over batches."""
    return sum(
        (_num_combinations(p) * jnp.mean(values) for p, values in rows.items()),
        jnp.zeros(()),
    )


def margins(rows: Rows) -> dict[Plate, jax.Array]:
    """What each row of a plate contributes, summed over the other plates."""
    found: dict[Plate, jax.Array] = {}
    for plates, values in rows.items():
        for axis, plate in enumerate(plates):
            others = tuple(a for a in range(values.ndim) if a != axis)
            margin = jnp.mean(values, others) * (_num_combinations(plates) / plate.size)
            found[plate] = found.get(plate, 0.0) + margin
    return found


def noise_variance(rows: Rows) -> jax.Array:
    """
    Variance of :func:`total` over batches, estimated from these rows.

    For each plate (1 - m/n) n² s² / m, with s² the sample variance of what its rows
    contribute: the variance of a mean drawn without replacement. One row shows no
    spread: the variance is then not a number.
    """
    variance = jnp.zeros(())
    for (_, n, m), margin in margins(rows).items():
        if m < n:
            factor = (1 - m / n) * float(n) ** 2 / m
            variance += factor * jnp.var(margin, ddof=1)
    return variance


def shows_noise(plates: tuple[Plate, ...]) -> bool:
    """Whether a batch can tell its own noise: a single row shows no spread."""
    return all(plate.subsample_size > 1 or plate.size == 1 for plate in plates)


def _num_combinations(plates: tuple[Plate, ...]) -> float:
    return float(math.prod(plate.size for plate in plates))


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
        return sum(_num_combinations(group) for group in groups)
    shapes = (
        jnp.shape(site["value"])[: jnp.ndim(site["value"]) - site["fn"].event_dim]
        for site in observed
        if not site["infer"].get("is_auxiliary")  # `factor`, which has no value
    )
    return float(max(sum(math.prod(shape) for shape in shapes), 1))


def make_evaluate(
    model: Callable,
    data: Data,
    unravel: Callable[[Vector], dict[str, Any]],
    temperature: jax.Array,
    reference: Reference | None,
    *,
    bias_correction: bool,
    temper_prior: bool,
    gradient: bool,
) -> Callable[..., Point]:
    r"""
    θ and batch to the tempered log-density, its gradient and its noise.

    A third argument may be the data with the rows of the batch, if they are on disk and
    were fetched already.

    With noise of variance v in the log-density, the chain's marginal is that of
    :math:`E_I[e^{L_I}] \approx e^{L + v / 2}`: ``bias_correction`` takes v/2 away, as
    estimated on the batch (the penalty of Ceperley and Dewing). At m = n it is zero.

    :param reference: of the control variate, which takes noise away from the rows and
        leaves their sum over all data unchanged, up to a constant.
    """
    correct = bias_correction and shows_noise(data.plates)

    def objective(
        named: dict[str, Any], batch: Batch, data: Data
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
        seen = batch if reference is None else reference.join(batch)

        def rows_at(z: jax.Array) -> Rows:
            return log_terms(model, data, unravel(z), seen).rows

        terms = log_terms(model, data, named, seen)
        rows = whole = terms.rows
        known = sure = jnp.zeros(())
        if reference is not None:
            missed, known = remainder(rows, rows_at, reference, flatten(named))
            rows, exact = reference.part(missed, batch)
            known += exact
            whole, sure = reference.part(whole, batch)
        if data.axes:
            known *= own_share(data)
        likelihood = terms.exact + total(rows) + known
        noise = noise_variance(rows) / temperature**2
        if temper_prior:
            value = (terms.prior + likelihood) / temperature + terms.log_det
        else:
            value = terms.prior + likelihood / temperature + terms.log_det
        if correct:
            value -= noise / 2
        energy = -(terms.prior + terms.exact + sure + total(whole) + terms.log_det)
        return value, (value, energy, noise)

    def evaluate(z: Vector, batch: Batch, fetched: Data | None = None) -> Point:
        on_batch = partial(objective, batch=batch, data=fetched or fetch(data, batch))
        if not gradient:
            value, energy, noise = across(data, on_batch(unravel(z))[1])
            nothing = jax.tree.map(jnp.zeros_like, z)
            return Point(z, batch, value, nothing, energy, noise)
        # By site, since the gradient by slices of one long vector takes as long again.
        (_, figures), by_site = jax.value_and_grad(on_batch, has_aux=True)(unravel(z))
        (value, energy, noise), grad = across(data, (figures, as_vector(by_site, z)))
        return Point(z, batch, value, grad, energy, noise)

    return evaluate
