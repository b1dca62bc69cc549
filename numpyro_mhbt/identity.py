"""What tells one run from another, as JSON that is the same in every process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import dataclasses
import hashlib
from importlib.metadata import version
import json
from typing import Any

import jax
from jax import random
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

import numpyro_mhbt
from numpyro_mhbt.state import MHBTState
from numpyro_mhbt.target import Data, fingerprint

_SMALL = 2**20
_SHORT = 80


def of_run(
    mcmc: MCMC,
    data: Data,
    rng_key: jax.Array,
    extra_fields: tuple[str, ...],
    init_params: Any,
    warm: MHBTState | None,
) -> dict[str, Any]:
    """What must be the same for the draws to be the same, but for the model itself."""
    settings = _describe(mcmc.sampler._settings)
    method = mcmc.chain_method
    shapes = jax.tree.map(_describe_shape, (data.args, data.kwargs))
    return {
        **{name: version(name) for name in ("numpyro", "jax", "jaxlib")},
        "numpyro_mhbt": numpyro_mhbt.__version__,
        "platform": jax.default_backend(),
        "jax_enable_x64": jax.config.read("jax_enable_x64"),
        **{f"MHBT.{name}": value for name, value in settings.items()},
        "num_warmup": mcmc.num_warmup,
        "num_samples": mcmc.num_samples,
        "thinning": mcmc.thinning,
        "num_chains": mcmc.num_chains,
        "chain_method": method if isinstance(method, str) else _describe(method),
        "jit_model_args": mcmc._jit_model_args,
        "extra_fields": sorted(extra_fields),
        "rng_key": _describe_key(rng_key),
        "init_params": _describe(init_params),
        "post_warmup_state": _describe(warm),
        "data": [str(int(fingerprint(data))), str(shapes)],
    }


def of_step(mcmc: MCMC, state: MHBTState, mapped: bool) -> dict[str, Any]:
    """
    A step as JAX sees it: another model has another one.

    :param mapped: whether a step sees one chain only of those in the state.
    """
    # Shapes alone: arrays of several devices make another program.
    seen = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape[mapped:], x.dtype), state
    )
    step = jax.make_jaxpr(lambda x: mcmc.sampler.sample(x, mcmc._args, mcmc._kwargs))
    code = hashlib.sha256()
    for part in _walk(step(seen)):
        code.update(part.encode())
    return {"model": code.hexdigest()}


def differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What of ``now`` was another before, in words."""
    return [
        f"`{name}` ({_shortened(before.get(name))} there, {_shortened(value)} here)"
        for name, value in json.loads(json.dumps(now)).items()
        if before.get(name) != value
    ]


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


def _describe(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _describe_array(value)
    if isinstance(value, Mapping):
        return {str(key): _describe(x) for key, x in value.items()}
    if isinstance(value, MHBTState):
        return [_describe(x) for x in jax.tree.leaves(value)]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _describe(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [_describe(x) for x in value]
    return _named(value)


def _named(value: Any) -> str:
    """By name, for a ``repr`` may have an address in it."""
    if isinstance(value, str | int | float | None):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _describe_shape(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else _named(x)


def _describe_key(rng_key: jax.Array) -> str:
    """The same for keys of the old kind."""
    return f"{random.key_impl(rng_key)} {_describe_array(random.key_data(rng_key))}"


def _describe_array(array: Any) -> str:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        return _describe_key(array)
    array = np.asarray(array)
    if array.size <= 4:
        return str(array.tolist())
    few = array
    if array.nbytes > _SMALL:
        places = np.linspace(0, array.size - 1, 1024).astype(int)
        few = array[np.unravel_index(places, array.shape)]
    code = hashlib.sha256(np.ascontiguousarray(few).tobytes()).hexdigest()[:16]
    return f"{array.dtype}{list(array.shape)} {code}"


def _walk(program: Any) -> Iterator[str]:
    """Operations, shapes and constants of a program, and of those within it."""
    if isinstance(program, ClosedJaxpr):
        yield from (_describe_array(x) for x in program.consts if hasattr(x, "dtype"))
        program = program.jaxpr
    for equation in program.eqns:
        yield equation.primitive.name
        for x in equation.invars:
            if isinstance(x, Literal):
                yield repr(np.asarray(x.val).tolist())
        for x in equation.outvars:
            yield f"{getattr(x.aval, 'dtype', '')}{getattr(x.aval, 'shape', '')}"
        for param in equation.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from _walk(inner)
