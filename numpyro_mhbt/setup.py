"""From a model and its arguments to data, a valid point and constrained draws."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_sample, init_to_uniform
from numpyro.infer.util import constrain_fn, initialize_model, unconstrain_fn

from numpyro_mhbt.checks import check_names, finite_sites, mark_missing, nan_rows
from numpyro_mhbt.control import find_reference
from numpyro_mhbt.disk import fetch
from numpyro_mhbt.mesh import Placement, across, agreed, check_axes, own_key
from numpyro_mhbt.plates import (
    Batch,
    Plate,
    draw_batch,
    find_plates,
    first_rows,
    is_subsampled,
    plates_of,
    pool,
    structure,
    with_rows,
)
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.target import (
    Data,
    log_terms,
    make_evaluate,
    num_rows,
    site_log_probs,
    total,
)

_SEARCH_STEPS = 1000
_STARTS = 4


class Look(NamedTuple):
    """A valid point, findings that may be errors, and the ends of searches."""

    z: dict[str, Any]
    params: dict[str, Any]
    finite: dict[str, jax.Array]
    nan_rows: dict[str, dict[str, jax.Array]]
    modes: jax.Array | None
    """Candidates for the reference, the best first; None if none is needed."""


def read(
    model: Callable, model_args: tuple, model_kwargs: dict[str, Any] | None
) -> tuple[Data, dict[str, dict[str, Any]]]:
    """The data of a run with their plates, and the sites of the model."""
    args, kwargs = jax.tree.map(_to_jax, (model_args, model_kwargs or {}))
    sites = structure(model, args, kwargs)
    plates = find_plates(sites)
    return Data(args, kwargs, plates, num_rows(sites, plates), {}), sites


def _to_jax(x: Any) -> Any:
    """NumPy arrays cannot be indexed by the traced rows of a batch."""
    if isinstance(x, np.ndarray) and x.dtype.kind in "biufc":
        return jnp.asarray(x)
    return check_axes(x)


class _Static(NamedTuple):
    """What of :class:`Data` a compiled program depends on."""

    tree: Any
    leaves: tuple
    plates: tuple[Plate, ...]
    num_rows: float
    placement: Placement | None
    options: tuple


# Compile in a third of the time what then runs for a moment only.
_QUICK = {"xla_backend_optimization_level": 1, "xla_cpu_use_fusion_emitters": False}


@cache
def _quick_options() -> dict[str, Any] | None:
    """:data:`_QUICK`, unless this XLA does not know the names."""
    try:
        jax.jit(jnp.negative, compiler_options=_QUICK)(1.0)
    except jax.errors.JaxRuntimeError:
        return None
    return _QUICK


def jit_data(fn: Callable, *, quick: bool = False) -> Callable:
    """
    ``jit`` of a function of :class:`Data`, compiled once per shape.

    The arrays in the data are arguments of the program: as constants they would be
    copied several times by the compiler. Keyword arguments are static.

    :param quick: whether it runs for a moment only, and had better be compiled fast.
    """

    def run(static: _Static, arrays: list[jax.Array], *rest: Any) -> Any:
        left = iter(arrays)
        leaves = [next(left) if x is _ARRAY else x for x in static.leaves]
        args, kwargs, params = jax.tree.unflatten(static.tree, leaves)
        data = Data(
            args, kwargs, static.plates, static.num_rows, params, static.placement
        )
        return fn(data, *rest, **dict(static.options))

    thorough = jax.jit(run, static_argnums=0)
    options = _quick_options() if quick else None
    chosen = jax.jit(run, static_argnums=0, compiler_options=options)

    def call(data: Data, *rest: Any, **options: Any) -> Any:
        leaves, tree = jax.tree.flatten((data.args, data.kwargs, data.params))
        is_array = [isinstance(x, jax.Array) for x in leaves]
        static = _Static(
            tree,
            tuple(_ARRAY if a else x for a, x in zip(is_array, leaves, strict=True)),
            data.plates,
            data.num_rows,
            data.placement,
            tuple(options.items()),
        )
        arrays = [x for a, x in zip(is_array, leaves, strict=True) if a]
        try:
            hash(static)
        except TypeError:  # an argument that cannot be a key: compile for this call
            return jax.jit(partial(run, static))(arrays, *rest)
        # Where `pmap` traces this, it is part of a program with options of its own.
        nested = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(rest))
        return (thorough if nested else chosen)(static, arrays, *rest)

    return call


_ARRAY = object()


def given_temperature(settings: Settings, data: Data) -> float | None:
    """T = n / c_n at the start, or None if it is to be chosen."""
    n = data.num_rows
    if callable(settings.temperature):
        return float(settings.temperature(jnp.zeros((), jnp.int32)))
    if settings.temperature is not None:
        c_n = n / settings.temperature
    elif settings.c_n is not None:
        c_n = settings.c_n
    else:
        return None if is_subsampled(data.plates) else 1.0
    if c_n > n * (1 + 1e-6):
        raise ValueError(
            f"c_n = {c_n:g} is larger than the number of rows n = {n:g}, which means "
            f"a temperature of {n / c_n:g}, below 1."
        )
    return n / c_n


def look(data: Data, temperature: jax.Array, settings: Settings) -> Look:
    """
    Find a valid point, rows that are NaN, and modes, with fixed keys.

    :param temperature: at which to search for modes.
    """
    model = settings.model
    key_batch, key_init, key_search = random.split(random.key(0), 3)
    batch = draw_batch(own_key(data, key_batch), data.plates)
    data = data._replace(params=agreed(data, _param_values(model, data, batch)))
    starts = jax.vmap(lambda key: initial_params(key, settings, data, batch))(
        random.split(key_init, _STARTS)
    )
    z = jax.tree.map(lambda x: x[0], starts)
    found = site_log_probs(model, data, z, batch)
    finite = finite_sites(data, mark_missing(data, *found))
    modes = None
    control = settings.control_variate
    chosen = settings.c_n is None and settings.temperature is None
    if is_subsampled(data.plates):
        if control is not None and control.ref_params is not None:
            given = dict(control.ref_params)
            check_names("ref_params", given, z)
            on_batch = seed(with_rows(model, batch), random.key(0))
            z_ref = unconstrain_fn(on_batch, data.args, data.kwargs, given)
            modes = ravel_pytree({name: z_ref[name] for name in z})[0][None]
        elif control is not None or chosen:
            modes = _search(key_search, settings, data, starts, temperature)
    return Look(z, data.params, finite, nan_rows(model, data, z), modes)


def _search(
    rng_key: jax.Array,
    settings: Settings,
    data: Data,
    starts: dict[str, Any],
    temperature: jax.Array,
) -> jax.Array:
    """Where climbs from several starts end, the highest first."""
    climb_from = partial(
        climb,
        settings=settings,
        data=data,
        temperature=temperature,
        num_steps=_SEARCH_STEPS,
    )
    modes = jax.vmap(climb_from)(random.split(rng_key, _STARTS), starts)
    unravel = ravel_pytree(jax.tree.map(lambda x: x[0], starts))[1]
    rows = pool(data.plates)
    fetched = fetch(data, rows)

    def height(z: jax.Array) -> jax.Array:
        terms = log_terms(settings.model, fetched, unravel(z), rows)
        value = across(data, terms.prior + terms.exact + total(terms.rows))
        return jnp.where(jnp.isfinite(value), value, -jnp.inf)

    return modes[jnp.argsort(-lax.map(height, modes))]


def climb(
    rng_key: jax.Array,
    z: dict[str, Any],
    settings: Settings,
    data: Data,
    temperature: jax.Array,
    num_steps: int,
) -> jax.Array:
    """Where mini-batch optimisation of the tempered log-density leads from ``z``."""
    flat, unravel = ravel_pytree(z)
    evaluate = make_evaluate(
        settings.model,
        data,
        unravel,
        temperature.astype(flat.dtype),
        None,
        bias_correction=False,
        temper_prior=settings.temper_prior,
        gradient=True,
    )
    return find_reference(
        rng_key,
        flat,
        draw=lambda key: draw_batch(own_key(data, key), data.plates),
        gradient=lambda z, batch: evaluate(z, batch).grad,
        num_steps=num_steps,
    )


def initial_params(
    rng_key: jax.Array, settings: Settings, data: Data, batch: Batch
) -> dict[str, Any]:
    """A starting point with finite density and gradient on ``batch``, if any."""
    found = initialize_model(
        rng_key,
        substitute(with_rows(settings.model, batch), data=data.params),
        init_strategy=settings.init_strategy or init_to_uniform,
        dynamic_args=True,
        model_args=data.args,
        model_kwargs=data.kwargs,
    )
    return agreed(data, found.param_info.z)


def _param_values(model: Callable, data: Data, batch: Batch) -> dict[str, Any]:
    """First values of sites that are not sampled: flax parameters without a prior."""
    started = substitute(
        seed(with_rows(model, batch), random.key(0)), substitute_fn=init_to_sample
    )
    sites = trace(started).get_trace(*data.args, **data.kwargs)
    return {
        name: site["value"]
        for name, site in sites.items()
        if site["type"] in ("param", "mutable")
    }


def replay(
    model: Callable, data: Data, rows: Batch, z: dict[str, Any]
) -> dict[str, Any]:
    """Constrained latent values, and deterministic sites on the given rows."""
    model = seed(with_rows(model, rows), random.key(0))
    return constrain_fn(model, data.args, data.kwargs, z, return_deterministic=True)


def find_batch_sites(
    model: Callable, data: Data, sites: dict[str, dict[str, Any]], z: dict[str, Any]
) -> frozenset[str]:
    """Deterministic sites whose values depend on which rows are in the batch."""
    names = {name for name, site in sites.items() if site["type"] == "deterministic"}
    if not names or not is_subsampled(data.plates):
        return frozenset()
    # Follow the rows through the program of the model.
    program, shapes = jax.make_jaxpr(partial(replay, model, data), return_shape=True)(
        first_rows(data.plates), z
    )
    num_rows_in = len(data.plates)
    reached = {id(x) for x in program.jaxpr.invars[:num_rows_in]}
    for equation in program.jaxpr.eqns:
        if any(id(x) in reached for x in equation.invars):
            reached |= {id(x) for x in equation.outvars}
    depends = jax.tree.unflatten(
        jax.tree.structure(shapes), [id(x) in reached for x in program.jaxpr.outvars]
    )
    return frozenset(
        name
        for name in names
        if plates_of(sites[name], data.plates) or any(jax.tree.leaves(depends[name]))
    )
