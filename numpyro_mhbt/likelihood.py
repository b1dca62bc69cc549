"""The log-likelihood of each row, of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed
from numpyro.infer.util import log_likelihood as on_rows
from tqdm.auto import tqdm

from numpyro_mhbt.passes import PATIENCE
from numpyro_mhbt.plates import with_rows
from numpyro_mhbt.setup import jit_data, read
from numpyro_mhbt.target import Data

_AT_ONCE = 2**24


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
    :param int chunk_size: rows at once. ``None``: as many as make some 10^7 numbers.
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
    data, sites = read(model, args, kwargs)
    draws = jax.tree.map(jnp.asarray, posterior_samples)
    plate = max(data.plates, key=lambda plate: plate.size, default=None)
    n = plate.size if plate else 1
    if chunk_size is None:
        num_draws = np.prod(np.shape(next(iter(draws.values())))[:batch_ndims])
        chunk_size = max(int(_AT_ONCE / num_draws), 1)
    size = min(chunk_size, n)

    def chunk(data: Data, draws: dict[str, Any], start: jax.Array) -> dict[str, Any]:
        rows = {p.name: jnp.arange(p.size) for p in data.plates}
        if plate:
            rows[plate.name] = start + jnp.arange(size)
        seeded = seed(with_rows(model, rows), random.key(0))
        return on_rows(
            seeded, draws, *data.args, batch_ndims=batch_ndims, **data.kwargs
        )

    program = jit_data(chunk)
    found: dict[str, np.ndarray] = {}
    starts = tqdm(
        range(0, n, size),
        desc="Log-likelihood",
        delay=PATIENCE,
        leave=False,
        disable=not progress_bar,
    )
    for start in starts:
        first = min(start, n - size)  # the last chunk reaches back
        for name, part in program(data, draws, jnp.array(first)).items():
            frames = {frame.name: frame for frame in sites[name]["cond_indep_stack"]}
            if plate is None or plate.name not in frames:
                found[name] = np.asarray(part)
                continue
            axis = part.ndim + frames[plate.name].dim
            shape = (*part.shape[:axis], n, *part.shape[axis + 1 :])
            if name not in found:
                found[name] = np.empty(shape, part.dtype)
            place = (slice(None),) * axis + (slice(first, first + size),)
            found[name][place] = part
    return found
