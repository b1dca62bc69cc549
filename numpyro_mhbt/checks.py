"""Errors that name the site and the way out, before the first step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from numpyro.distributions import Distribution
from numpyro.util import not_jax_tracer

from numpyro_mhbt.disk import fetch
from numpyro_mhbt.mesh import across, everyones, everywhere, numbered, own_share
from numpyro_mhbt.plates import Batch, Plate, few_batches, first_rows, plates_of
from numpyro_mhbt.target import (
    Data,
    Terms,
    by_row,
    log_terms,
    site_log_probs,
)


def check_sites(
    sites: Mapping[str, Mapping[str, Any]], plates: tuple[Plate, ...]
) -> None:
    """Refuse discrete latent sites and latent sites inside a subsampled plate."""
    for name, site in sites.items():
        if site["type"] != "sample" or site["is_observed"]:
            continue
        inside = [p for p in plates_of(site, plates) if p.subsample_size < p.size]
        if inside:
            raise ValueError(
                f"Latent site '{name}' is inside the subsampled plate "
                f"'{inside[0].name}', where only rows of the batch have values. Move "
                "it out of the plate (and index it by the rows), marginalise it, or "
                "drop `subsample_size`."
            )
        if site["fn"].support.is_discrete:
            raise ValueError(
                f"Latent site '{name}' is discrete, and MHBT moves in continuous "
                "space. Marginalise it, for example with `dist.MixtureSameFamily`."
            )


def check_names(
    what: str, values: Mapping[str, Any], latent: Mapping[str, Any]
) -> None:
    """Refuse values that are not one for each latent site."""
    if set(values) != set(latent):
        raise ValueError(
            f"`{what}` must have a value for each latent site {sorted(latent)}, "
            f"got {sorted(values)}."
        )


def finite_sites(
    data: Data, log_probs: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Whether each site has a density, on all devices."""
    finite = {name: jnp.all(jnp.isfinite(x)) for name, x in log_probs.items()}
    if not data.axes:
        return finite
    missing = across(data, {name: jnp.sum(~ok) for name, ok in finite.items()})
    return {name: number == 0 for name, number in missing.items()}


def check_start(
    finite: Mapping[str, jax.Array], slopes: Mapping[str, jax.Array] | None = None
) -> None:
    """
    Refuse an initial point without density, given :func:`finite_sites` of it.

    :param slopes: whether the derivatives by each latent site are finite.
    """
    bad = _not_all(finite)
    if bad:
        raise ValueError(
            "The initial point has zero density, or the data contain NaN: the "
            f"log-density of site(s) {bad} is not finite. Check the data there, "
            "mask missing values, or choose another `init_strategy` or `init_params`."
        )
    bad = _not_all(slopes or {})
    if bad:
        raise ValueError(
            "At the initial point the gradient of the log-density is not finite by "
            f"site(s) {bad}, and no proposal could leave it. Mend the gradient (the "
            "branch of a `jnp.where` that is not taken must be finite, too), choose "
            "another `init_strategy` or `init_params`, or use `RandomWalk`, which "
            "needs no gradient."
        )


def _not_all(ok: Mapping[str, jax.Array]) -> str:
    return ", ".join(f"'{name}'" for name, value in ok.items() if not np.all(value))


def checked_start(
    i: jax.Array, finite: Mapping[str, jax.Array], slopes: Mapping[str, jax.Array]
) -> jax.Array:
    """``i``, once :func:`check_start` has passed."""
    if all(not_jax_tracer(ok) for ok in (*finite.values(), *slopes.values())):
        check_start(finite, slopes)
        return i

    # `parallel` and `jax.vmap` trace `init`: ask when values are known, and let the
    # state depend on the answer, so that no step is taken before.
    def ask(i: np.ndarray, *found: Mapping[str, Any]) -> np.ndarray:
        check_start(*found)
        return i

    shape = jax.ShapeDtypeStruct(i.shape, i.dtype)
    found = dict(finite), dict(slopes)
    return jax.pure_callback(ask, shape, i, *found, vmap_method="sequential")


def mark_missing(
    data: Data,
    log_probs: Mapping[str, jax.Array],
    sites: Mapping[str, Mapping[str, Any]],
) -> dict[str, jax.Array]:
    """Log-densities, NaN where a value or parameter outside the plates is."""
    return {
        name: log_prob
        if plates_of(sites[name], data.plates)
        else jnp.where(_is_missing(sites[name], log_prob), jnp.nan, log_prob)
        for name, log_prob in log_probs.items()
    }


def nan_rows(
    model: Callable, data: Data, z: dict[str, Any]
) -> dict[str, dict[str, jax.Array]]:
    """
    By plate and site, the first row in each chunk where it is NaN, or -1.

    One pass over all rows of each plate, in chunks.
    """
    others = first_rows(data.plates)
    return {p.name: _nan_rows(model, data, z, others, p) for p in data.plates}


def _nan_rows(
    model: Callable, data: Data, z: dict[str, Any], others: Batch, plate: Plate
) -> dict[str, jax.Array]:
    chunk = min(plate.size, few_batches([plate]))

    def first_nan(start: jax.Array) -> dict[str, jax.Array]:
        rows = start + jnp.arange(chunk)
        batch = {**others, plate.name: rows}
        log_probs, sites = site_log_probs(model, fetch(data, batch), z, batch)
        found = {}
        for name, log_prob in log_probs.items():
            if plates_of(sites[name], (plate,)):
                missing = jnp.where(_is_missing(sites[name], log_prob), 1.0, 0.0)
                bad = by_row(sites[name], missing, (plate,)) > 0
                found[name] = jnp.where(jnp.any(bad), rows[jnp.argmax(bad)], -1)
        return found

    starts = jnp.minimum(jnp.arange(0, plate.size, chunk), plate.size - chunk)
    found = lax.map(first_nan, starts)
    if data.axes:
        here = {
            k: numbered(data, {plate.name: v})[plate.name] for k, v in found.items()
        }
        here = {k: jnp.where(found[k] < 0, -1, v) for k, v in here.items()}
        found = jax.tree.map(jnp.ravel, everyones(data, here))
    return found


def _is_missing(site: Mapping[str, Any], log_prob: jax.Array) -> jax.Array:
    """NaN in the density, or in a value or a parameter that is not masked."""
    # NumPyro gives a value outside the support, NaN included, the density zero.
    value = jnp.isnan(site["value"])
    event_dims = tuple(range(value.ndim - site["fn"].event_dim, value.ndim))
    missing = jnp.isnan(log_prob) | (~jnp.isfinite(log_prob) & value.any(event_dims))
    return missing | _has_nan(site["fn"])


def _has_nan(fn: Distribution) -> jax.Array:
    """
    Whether a parameter is NaN, by the batch shape of ``fn``.

    The density may be a number all the same: with logits that are NaN, a Bernoulli
    variable is 0 with certainty.
    """
    if hasattr(fn, "base_dist"):
        return _by_batch(_has_nan(fn.base_dist), fn) & getattr(fn, "_mask", True)
    found = jnp.zeros(fn.batch_shape, bool)
    for name, constraint in fn.arg_constraints.items():
        value = vars(fn).get(name)  # one of `probs` and `logits` is not there
        if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jnp.floating):
            # A few have shapes of their own, and must tell by their density.
            with suppress(NotImplementedError, ValueError):
                event_dims = range(value.ndim - constraint.event_dim, value.ndim)
                found |= _by_batch(jnp.isnan(value).any(tuple(event_dims)), fn)
    return found


def _by_batch(found: jax.Array, fn: Distribution) -> jax.Array:
    """``found`` by the batch shape of ``fn``, which may count more axes as an event."""
    found = found.any(tuple(range(len(fn.batch_shape), found.ndim)))
    return jnp.broadcast_to(found, fn.batch_shape)


def check_rows(found: Mapping[str, Mapping[str, jax.Array]]) -> None:
    """Refuse data with NaN, given :func:`nan_rows` of them."""
    for plate, by_site in found.items():
        for name, rows in by_site.items():
            bad = np.asarray(rows)[np.asarray(rows) >= 0]
            if bad.size:
                raise ValueError(
                    f"Site '{name}' is NaN at row {bad[0]} of plate '{plate}': the "
                    "data contain NaN. Drop such rows, or mask them with "
                    "`numpyro.handlers.mask`."
                )


def both_views(
    data: Data, z: dict[str, Any], *, model: Callable
) -> dict[str, tuple[jax.Array, jax.Array]]:
    """
    Parts of the log-density on one row of each device, computed in two ways.

    Once with all rows before the model's eyes, and once on each device with its own.
    """
    (plate,), placement = data.plates, data.placement
    assert placement is not None

    def parts(terms: Terms) -> dict[str, jax.Array]:
        return {"prior": terms.prior + terms.log_det, "exact": terms.exact}

    def here(data: Data, z: dict[str, Any]) -> dict[str, jax.Array]:
        terms = log_terms(model, data, z, {plate.name: jnp.arange(1)})
        alike = {name: x / own_share(data) for name, x in parts(terms).items()}
        (row,) = sum(terms.rows.values(), jnp.zeros(1))
        return everyones(data, {**alike, "rows": row})

    firsts = jnp.arange(placement.num_shards) * placement.local(data.plates)[0].size
    terms = log_terms(model, data._replace(placement=None), z, {plate.name: firsts})
    whole = {**parts(terms), "rows": sum(terms.rows.values(), jnp.zeros(1))}
    found = everywhere(here)(data, z)
    return {part: (whole[part], found[part]) for part in whole}


_PARTS = {
    "prior": "prior",
    "exact": "likelihood outside the subsampled plate",
    "rows": "likelihood of a row",
}


def check_views(found: Mapping[str, tuple[jax.Array, jax.Array]]) -> None:
    """Refuse a model that :func:`both_views` see differently."""
    for part, (whole, here) in found.items():
        same = np.allclose(whole, here, rtol=1e-3, atol=1e-3, equal_nan=True)
        if part != "rows":  # of which each device has another
            same &= np.allclose(here, here[0], rtol=1e-5, atol=1e-5, equal_nan=True)
        if not same:
            raise ValueError(
                f"The data are sharded, and the {_PARTS[part]} is another when a "
                "device sees its own rows only: the model uses the number of rows, or "
                "a sum over them, outside of its subsampled plate. Compute such "
                "numbers before, and pass them as arguments."
            )
