"""Of each row, of all of them: the log-likelihood, and what the draws predict."""

from __future__ import annotations

from collections.abc import Callable
import math
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, uncondition
from numpyro.infer import Predictive
from numpyro.infer.util import log_likelihood as on_rows
from tqdm.auto import tqdm

from numpyro_mhbt.disk import fetch
from numpyro_mhbt.passes import PATIENCE
from numpyro_mhbt.plates import Batch, Plate, few_batches, plates_of, with_rows
from numpyro_mhbt.setup import jit_data, read
from numpyro_mhbt.target import Data

_AT_ONCE = 2**24  # numbers returned


def log_likelihood(
    model: Callable,
    posterior_samples: dict[str, Any],
    *args: Any,
    batch_ndims: int = 1,
    chunk_size: int | None = None,
    progress_bar: bool = True,
    **kwargs: Any,
) -> dict[str, np.ndarray]:
    """
    Log-likelihood of every row at each draw, as ArviZ's ``loo`` and ``waic`` need it.

    NumPyro's function of this name sees one random batch of a subsampled plate. This
    one passes over all rows of the largest such plate in chunks. What it returns is a
    number for each draw and row, in the memory of the host: thin the draws first if
    these are too many.

    :param model: NumPyro model.
    :param dict posterior_samples: draws of its latent sites.
    :param args: arguments of the model, with all rows.
    :param int batch_ndims: leading axes of the draws: 1, or 2 if they are grouped by
        chain, as ArviZ has them.
    :param int chunk_size: rows at once. ``None``: as many as a few batches have.
    :param bool progress_bar: whether to show one, should it take longer than seconds.
    :param kwargs: keyword arguments of the model.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro_mhbt import log_likelihood
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal())
        ...     with numpyro.plate("N", len(y), subsample_size=2) as idx:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[idx])
        >>> draws = {"mu": jnp.zeros(100)}
        >>> log_likelihood(model, draws, jnp.arange(5.0))["y"].shape
        (100, 5)
    """

    def values(data: Data, draws: dict[str, Any], rows: Batch, _: jax.Array) -> Any:
        seeded = seed(with_rows(model, rows), random.key(0))
        return on_rows(
            seeded, draws, *data.args, batch_ndims=batch_ndims, **data.kwargs
        )

    data, sites = read(model, args, kwargs)
    observed = {k: site for k, site in sites.items() if _is_observed(site)}
    return _in_chunks(
        values,
        data,
        posterior_samples,
        observed,
        event_dims=dict.fromkeys(observed, 0),
        batch_ndims=batch_ndims,
        chunk_size=chunk_size,
        what="Log-likelihood" if progress_bar else None,
    )


def predict(
    model: Callable,
    posterior_samples: dict[str, Any],
    *args: Any,
    rng_key: jax.Array,
    batch_ndims: int = 1,
    progress_bar: bool = True,
    **kwargs: Any,
) -> dict[str, np.ndarray]:
    """Observed sites drawn anew for every row at each draw, whatever was observed."""

    def values(data: Data, draws: dict[str, Any], rows: Batch, at: jax.Array) -> Any:
        free = uncondition(with_rows(model, rows))
        predictive = Predictive(
            free, draws, return_sites=list(observed), batch_ndims=batch_ndims
        )
        return predictive(random.fold_in(rng_key, at), *data.args, **data.kwargs)

    data, sites = read(model, args, kwargs)
    # A factor has no value to draw.
    observed = {
        k: site
        for k, site in sites.items()
        if _is_observed(site) and jnp.size(site["value"])
    }
    return _in_chunks(
        values,
        data,
        posterior_samples,
        observed,
        event_dims={k: site["fn"].event_dim for k, site in observed.items()},
        batch_ndims=batch_ndims,
        chunk_size=None,
        what="Predictions" if progress_bar else None,
    )


def _is_observed(site: dict[str, Any]) -> bool:
    return site["type"] == "sample" and site["is_observed"]


def _in_chunks(
    values: Callable,
    data: Data,
    draws: dict[str, Any],
    sites: dict[str, dict[str, Any]],
    *,
    event_dims: dict[str, int],
    batch_ndims: int,
    chunk_size: int | None,
    what: str | None,
) -> dict[str, np.ndarray]:
    """
    ``values`` of ``sites`` for all rows, from chunks of the largest plate they are in.

    :param values: function of data, draws, rows and first row of the chunk.
    :param event_dims: how many axes of the values stand behind those of plates.
    """
    draws = jax.tree.map(jnp.asarray, draws)
    num_draws = math.prod(jnp.shape(jax.tree.leaves(draws)[0])[:batch_ndims])
    groups: dict[tuple[Plate, ...], list[str]] = {}
    for name, site in sites.items():
        groups.setdefault(plates_of(site, data.plates), []).append(name)
    found: dict[str, np.ndarray] = {}
    for group, names in groups.items():
        plate = max(group, key=lambda plate: plate.size, default=Plate("", 1, 1))
        others = math.prod(p.size for p in group) // plate.size
        room = min(few_batches(group), _AT_ONCE // num_draws) // others
        size = min(chunk_size or max(room, 1), plate.size)

        def chunk(
            data: Data,
            draws: dict[str, Any],
            start: jax.Array,
            group: tuple[Plate, ...] = group,
            names: list[str] = names,
            plate: Plate = plate,
            size: int = size,
        ) -> Any:
            rows = {p.name: jnp.arange(1) for p in data.plates}
            rows |= {p.name: jnp.arange(p.size) for p in group}
            rows[plate.name] = start + jnp.arange(size)
            everything = values(fetch(data, rows), draws, rows, start)
            return {name: everything[name] for name in names}

        program = jit_data(chunk)
        starts = range(0, plate.size, size)
        for start in tqdm(
            starts, desc=what, delay=PATIENCE, leave=False, disable=what is None
        ):
            first = min(start, plate.size - size)  # the last chunk reaches back
            for name, part in program(data, draws, jnp.array(first)).items():
                frames = {f.name: f for f in sites[name]["cond_indep_stack"]}
                if plate.name not in frames:
                    found[name] = np.asarray(part)
                    continue
                axis = part.ndim + frames[plate.name].dim - event_dims[name]
                if name not in found:
                    shape = (*part.shape[:axis], plate.size, *part.shape[axis + 1 :])
                    found[name] = np.empty(shape, part.dtype)
                place = (slice(None),) * axis + (slice(first, first + size),)
                found[name][place] = part
    return found
