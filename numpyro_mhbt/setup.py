"""What is settled once per run, from the data alone and alike in all chains."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
import math
from typing import Any, NamedTuple

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_sample
from numpyro.infer.util import constrain_fn, initialize_model, unconstrain_fn

from numpyro_mhbt.checks import check_names, finite_sites, nan_rows
from numpyro_mhbt.control import Taylor, find_reference
from numpyro_mhbt.plates import (
    Batch,
    Plate,
    draw_batch,
    find_plates,
    first_rows,
    is_subsampled,
    plates_of,
    structure,
    with_rows,
)
from numpyro_mhbt.target import Data, make_evaluate, num_rows, site_log_probs


class Shared(NamedTuple):
    """What a chain carries along of :class:`Setup`."""

    params: dict[str, Any]
    """Values of ``param`` and ``mutable`` sites."""
    reference: jax.Array | None
    """θ_ref of the control variate, unconstrained and flat."""


class Setup(NamedTuple):
    """A valid point, what chains share, and findings that may be errors."""

    z: dict[str, Any]
    shared: Shared
    finite: dict[str, jax.Array]
    nan_rows: dict[str, dict[str, jax.Array]]


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
    return x


class _Static(NamedTuple):
    """What of :class:`Data` a compiled program depends on."""

    tree: Any
    leaves: tuple
    plates: tuple[Plate, ...]
    num_rows: float


def jit_data(fn: Callable) -> Callable:
    """
    ``jit`` of a function of :class:`Data`, compiled once per shape.

    The arrays in the data are arguments of the program: as constants they would be
    copied several times by the compiler.
    """

    def run(static: _Static, arrays: list[jax.Array], *rest: Any) -> Any:
        left = iter(arrays)
        leaves = [next(left) if x is _ARRAY else x for x in static.leaves]
        args, kwargs = jax.tree.unflatten(static.tree, leaves)
        return fn(Data(args, kwargs, static.plates, static.num_rows, {}), *rest)

    compiled = jax.jit(run, static_argnums=0)

    def call(data: Data, *rest: Any) -> Any:
        leaves, tree = jax.tree.flatten((data.args, data.kwargs))
        is_array = [isinstance(x, jax.Array) for x in leaves]
        static = _Static(
            tree,
            tuple(_ARRAY if a else x for a, x in zip(is_array, leaves, strict=True)),
            data.plates,
            data.num_rows,
        )
        arrays = [x for a, x in zip(is_array, leaves, strict=True) if a]
        try:
            hash(static)
        except TypeError:  # an argument that cannot be a key: compile for this call
            return jax.jit(partial(run, static))(arrays, *rest)
        return compiled(static, arrays, *rest)

    return call


_ARRAY = object()


def choose_temperature(
    data: Data, c_n: float | None, temperature: float | None
) -> jax.Array:
    """T = n / c_n, by the paper's rule if neither is given."""
    n = data.num_rows
    if temperature is not None:
        c_n = n / temperature
    elif c_n is None and is_subsampled(data.plates):
        # "A value close to but smaller than sqrt(m)": Remark 1 of the paper.
        m = sum(plate.subsample_size for plate in data.plates)
        c_n = min(n, 2 / 3 * math.sqrt(m))
    elif c_n is None:
        c_n = n
    if c_n > n * (1 + 1e-6):
        raise ValueError(
            f"c_n = {c_n:g} is larger than the number of rows n = {n:g}, which means "
            f"a temperature of {n / c_n:g}, below 1."
        )
    return jnp.asarray(n / c_n)


def make_setup(
    data: Data,
    model: Callable,
    temperature: jax.Array,
    control_variate: Taylor | None,
    init_strategy: Callable,
    temper_prior: bool,
) -> Setup:
    """Find a valid point and the reference, with fixed keys."""
    key_batch, key_init, key_search = random.split(random.key(0), 3)
    batch = draw_batch(key_batch, data.plates)
    data = data._replace(params=_param_values(model, data, batch))
    z = initial_params(key_init, model, data, batch, init_strategy)
    reference = None
    if control_variate is not None and is_subsampled(data.plates):
        if control_variate.ref_params is None:
            flat, unravel = ravel_pytree(z)
            evaluate = make_evaluate(
                model,
                data,
                unravel,
                temperature.astype(flat.dtype),
                None,
                temper_prior=temper_prior,
                gradient=True,
            )
            draw = partial(draw_batch, plates=data.plates)
            reference = find_reference(key_search, flat, draw, evaluate)
        else:
            ref_params = dict(control_variate.ref_params)
            check_names("ref_params", ref_params, z)
            on_batch = seed(with_rows(model, batch), random.key(0))
            z_ref = unconstrain_fn(on_batch, data.args, data.kwargs, ref_params)
            reference, _ = ravel_pytree({name: z_ref[name] for name in z})
    return Setup(
        z,
        Shared(data.params, reference),
        finite_sites(site_log_probs(model, data, z, batch)[0]),
        nan_rows(model, data, z),
    )


def initial_params(
    rng_key: jax.Array,
    model: Callable,
    data: Data,
    batch: Batch,
    init_strategy: Callable,
) -> dict[str, Any]:
    """A starting point with finite density and gradient on ``batch``, if any."""
    return initialize_model(
        rng_key,
        substitute(with_rows(model, batch), data=data.params),
        init_strategy=init_strategy,
        dynamic_args=True,
        model_args=data.args,
        model_kwargs=data.kwargs,
    ).param_info.z


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
