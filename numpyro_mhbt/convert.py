"""A finished run as ArviZ sees it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.distributions import Delta
from numpyro.handlers import block, seed, substitute, trace
from numpyro.infer import MCMC, init_to_sample

from numpyro_mhbt.advice import COLD, FEWEST, colder
from numpyro_mhbt.disk import files_of
from numpyro_mhbt.likelihood import log_likelihood as of_all_rows
from numpyro_mhbt.likelihood import predict
from numpyro_mhbt.plates import with_rows
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.setup import read
from numpyro_mhbt.state import MHBTState, num_params
from numpyro_mhbt.warn import warn


def finished(mcmc: MCMC, who: str) -> tuple[Settings, MHBTState]:
    """What a finished run of MHBT knows, or an error in the name of ``who``."""
    settings = getattr(mcmc.sampler, "_settings", None)
    if not isinstance(settings, Settings):
        raise TypeError(f"{who} needs a run of MHBT, got {mcmc.sampler!r}.")
    if mcmc.last_state is None:
        raise ValueError(f"{who} needs a finished run: call `mcmc.run` first.")
    return settings, mcmc.last_state


def temperature_of(state: MHBTState) -> float:
    """T at the end of the run, the same in all chains."""
    return float(np.ravel(state.temperature)[0])


def param_values(state: MHBTState) -> dict[str, Any]:
    """Of sites that are not sampled, the same in all chains."""
    many = np.ndim(state.i) > 0
    return jax.tree.map(lambda x: x[0] if many else x, state.shared.params)


def import_arviz() -> Any:
    """ArviZ, not before it is needed: it takes longer to import than this package."""
    with warnings.catch_warnings():  # 0.23 announces 1.0 once a day
        warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
        import arviz

    return arviz


def to_arviz(
    mcmc: MCMC,
    *,
    log_likelihood: bool = False,
    posterior_predictive: bool = False,
    thin: int = 1,
    rng_key: jax.Array | None = None,
    **kwargs: Any,
) -> Any:
    """
    A finished run as an ArviZ object, with all rows and the temperature.

    ``az.from_numpyro`` makes the groups ``posterior``, ``sample_stats`` and
    ``observed_data`` of it, with dimensions named after plates. Added are the
    attributes ``temperature`` and ``c_n`` of the posterior and, if asked for, groups
    with a number for each draw and row, which are computed in chunks. In names of flax
    modules "." stands for "/".

    Draws from T > 1 are not those of the posterior, and neither are summaries and LOO
    made of them: a ``UserWarning`` says so.

    :param mcmc: after :meth:`~numpyro.infer.mcmc.MCMC.run` of a
        :class:`~numpyro_mhbt.MHBT` kernel, which still holds its data.
    :param bool log_likelihood: of each row, for ``az.loo``.
    :param bool posterior_predictive: the observed sites drawn anew, for checks of the
        model.
    :param int thin: keep every ``thin``-th draw, where rows are so many that a number
        for each of all draws would not fit in memory.
    :param rng_key: for ``posterior_predictive``.
    :param kwargs: ``coords``, ``dims`` and others of ``az.from_numpyro``.
    :return: ``InferenceData`` (ArviZ 0.x) or ``DataTree`` (1.x).

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_mhbt import MHBT, Taylor, to_arviz
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("N", len(y), subsample_size=100):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))
        >>> y = 3 + random.normal(random.key(0), (1000,))
        >>> kernel = MHBT(model, control_variate=Taylor(order=2))
        >>> mcmc = MCMC(kernel, num_warmup=100, num_samples=200, progress_bar=False)
        >>> mcmc.run(random.key(1), y)
        >>> data = to_arviz(mcmc, log_likelihood=True)
        >>> dict(data["log_likelihood"]["y"].sizes)
        {'chain': 1, 'draw': 200, 'N': 1000}
        >>> data["posterior"].attrs["temperature"]
        1.0
    """
    settings, state = finished(mcmc, "to_arviz")
    _warn_of_heat(mcmc, settings, state)
    named = _without_slashes(mcmc)
    if files_of((mcmc._args, mcmc._kwargs)):
        named.sampler = copy(mcmc.sampler)
        observed = partial(_observed, settings.model)
        named.sampler._settings = replace(settings, model=observed)
    found = import_arviz().from_numpyro(named, log_likelihood=False, **kwargs)
    if thin > 1:
        found = found.isel(draw=slice(None, None, thin))
    temperature = temperature_of(state)
    found["posterior"].attrs |= {
        "temperature": temperature,
        "c_n": state.shared.num_rows / temperature,
    }
    model = substitute(settings.model, data=param_values(state))
    options = {**mcmc._kwargs, "batch_ndims": 2, "progress_bar": mcmc.progress_bar}
    draws = {k: v[:, ::thin] for k, v in mcmc.get_samples(group_by_chain=True).items()}
    if log_likelihood:
        values = of_all_rows(model, draws, *mcmc._args, **options)
        _add_group(found, "log_likelihood", values)
    if posterior_predictive:
        key = random.key(0) if rng_key is None else rng_key
        values = predict(model, draws, *mcmc._args, rng_key=key, **options)
        _add_group(found, "posterior_predictive", values)
    return found


def _without_slashes(mcmc: MCMC) -> MCMC:
    """The run with "." for "/" in names, which ArviZ 1.x takes for a path of groups."""
    field, states = mcmc.sampler.sample_field, mcmc._states
    named = {name.replace("/", "."): draws for name, draws in states[field].items()}
    run = copy(mcmc)
    run._states, run._states_flat = {**states, field: named}, None
    return run


def _observed(model: Callable, *args: Any, **kwargs: Any) -> None:
    """
    The sites of the model on all rows, with no more of files than was observed.

    ArviZ runs a model as it is, which would read all files whole.
    """
    sites: dict[str, dict[str, Any]] = {}

    def look() -> dict[str, jax.Array]:
        rows = {plate.name: jnp.arange(plate.size) for plate in data.plates}
        seeded = seed(with_rows(model, rows), random.key(0))
        started = substitute(seeded, substitute_fn=init_to_sample)
        sites.update(trace(started).get_trace(*data.args, **data.kwargs))
        return {k: s["value"] for k, s in sites.items() if s.get("is_observed")}

    with block():  # from who asks for these sites
        data, _ = read(model, args, kwargs)
        # Compiled, what no observed value depends on is not read.
        values = jax.jit(look)()
    for name, site in sites.items():
        if site["type"] not in ("sample", "deterministic"):
            continue
        value = values.get(name, jnp.zeros(jnp.shape(site["value"])))
        with ExitStack() as around:
            for frame in site["cond_indep_stack"]:
                plate = numpyro.plate(frame.name, frame.size, dim=frame.dim)
                around.enter_context(plate)
            if site["type"] == "deterministic":
                numpyro.deterministic(name, value)
            else:
                like = Delta(value, event_dim=site["fn"].event_dim)
                obs = value if name in values else None
                numpyro.sample(name, like, obs=obs, infer=site["infer"])


def _add_group(found: Any, group: str, values: dict[str, np.ndarray]) -> None:
    """Named as in the observed data, of which log-likelihoods lack the last axes."""
    import xarray as xr

    arrays = {}
    for name, value in values.items():
        observed = found["observed_data"][name]
        dims = observed.dims[: value.ndim - 2]
        arrays[name] = xr.DataArray(value, dims=("chain", "draw", *dims)).assign_coords(
            {dim: observed[dim] for dim in dims if dim in observed.coords}
        )
    posterior = found["posterior"]
    along = {dim: posterior[dim] for dim in ("chain", "draw")}
    dataset = xr.Dataset(arrays).assign_coords(along)
    is_tree = not hasattr(found, "add_groups")  # ArviZ 1.x
    found[group] = xr.DataTree(dataset) if is_tree else dataset


def _warn_of_heat(mcmc: MCMC, settings: Settings, state: MHBTState) -> None:
    heat = temperature_of(state)
    schedule = settings.temperature_schedule
    if schedule is not None:
        draws = len(next(iter(mcmc.get_samples().values()))) // mcmc.num_chains
        first = np.ravel(state.i)[0] - draws * mcmc.thinning
        heat = max(heat, float(schedule(first)))
    if settings.on_reject == "refresh":
        text = "with on_reject='refresh' draws are of no posterior, tempered or not."
    elif heat > COLD:
        text = (
            f"draws are of the posterior raised to 1/T, T = {heat:.4g}, and so are "
            "summaries and LOO made of them. For the posterior itself "
            f"{_untempered(mcmc, state, heat)}{colder(settings)}."
        )
    else:
        return
    warn(text)


def _untempered(mcmc: MCMC, state: MHBTState, heat: float) -> str:
    """Named only where weights would leave some draws."""
    left = ((2 * heat - 1) / heat**2) ** (num_params(state) / 2)
    draws = mcmc.num_chains * mcmc.num_samples
    return "see `untemper`, or " if left * draws > FEWEST else ""
