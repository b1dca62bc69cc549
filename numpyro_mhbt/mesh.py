"""
Rows spread over a mesh of devices, on one machine or many.

Every program that touches the data runs on each device with the rows that it holds (one
stratum of k), and with plates as large as these: n/k rows, of which m/k are drawn.
What it computes of them (an estimate, its gradient, its noise) is summed across
devices, and what all devices know alike (the prior) counts as a share of 1/k on each.
So a sum of O(d) numbers is all that crosses the network. A sum of strata is also what
the variance of a stratified draw is, so the formulas are those of one device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import itertools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpyro.primitives import _PYRO_STACK, Messenger
from numpyro.primitives import plate as numpyro_plate
from numpyro.util import is_prng_key

from numpyro_mhbt.plates import Batch, Plate
from numpyro_mhbt.state import MHBTState, Setup
from numpyro_mhbt.vectors import flatten

if TYPE_CHECKING:
    from numpyro_mhbt.target import Data


class Placement(NamedTuple):
    """Where the rows of a run are."""

    mesh: Mesh
    axes: tuple[str, ...]
    """Of the mesh, over which rows are spread."""
    rows: tuple[bool, ...]
    """Which leaves of the model's arguments are arrays of rows."""

    @property
    def num_shards(self) -> int:
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def chain_axes(self, num_chains: int) -> tuple[str, ...]:
        """The other axes, over which chains are spread if they can be evenly."""
        others = tuple(a for a in self.mesh.axis_names if a not in self.axes)
        size = math.prod(self.mesh.shape[axis] for axis in others)
        return others if num_chains % size == 0 else ()

    def local(self, plates: tuple[Plate, ...]) -> tuple[Plate, ...]:
        """What of the plates one device has."""
        k = self.num_shards
        return tuple(Plate(p.name, p.size // k, p.subsample_size // k) for p in plates)


def find_placement(data: Data, rng_key: jax.Array | None = None) -> Placement | None:
    """
    How arrays of rows are sharded, if they are, or an error if they cannot be so.

    :param rng_key: of a run that begins.
    """
    plates = data.plates
    leaves = jax.tree_util.tree_leaves_with_path((data.args, data.kwargs))
    found = {i: axes for i, (_, x) in enumerate(leaves) if (axes := _row_axes(x))}
    if not found or not plates:
        return None
    if isinstance(rng_key, jax.core.Tracer):
        raise ValueError(
            "Sharded data take all devices for each chain: use "
            "`MCMC(..., chain_method='vectorized')`."
        )
    first = next(iter(found))
    mesh, axes = leaves[first][1].sharding.mesh, found[first]
    if len(plates) > 1:
        names = ", ".join(f"'{plate.name}'" for plate in plates)
        raise NotImplementedError(
            f"Sharded rows are drawn from one subsampled plate, but the model has "
            f"several: {names}. Keep `subsample_size` on one of them, or put all data "
            "on one device."
        )
    (only,) = plates
    for i, (path, x) in enumerate(leaves):
        where = _spell(path)
        if i not in found:
            if isinstance(x, jax.Array) and x.shape[:1] == (only.size,):
                raise ValueError(
                    f"{where} has as many rows as plate '{only.name}', but is not "
                    f"sharded as {_spell(leaves[first][0])} is. Give both the same "
                    f"`NamedSharding(mesh, P({', '.join(map(repr, axes))}))`."
                )
            continue
        if x.sharding.mesh != mesh or found[i] != axes:
            raise ValueError(
                f"{where} and {_spell(leaves[first][0])} are sharded in different "
                "ways. Give both the same `NamedSharding`."
            )
        if x.shape[0] != only.size:
            raise ValueError(
                f"{where} has {x.shape[0]} sharded rows, but plate '{only.name}' has "
                f"{only.size}."
            )
    rows = tuple(i in found for i in range(len(leaves)))
    placement = Placement(mesh, axes, rows)
    _check_sizes(only, placement.num_shards)
    return placement


def _row_axes(x: Any) -> tuple[str, ...]:
    """Axes of a mesh over which the rows of ``x`` are spread."""
    if not isinstance(x, jax.Array) or isinstance(x, jax.core.Tracer):
        return ()
    sharding = x.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size == 1:
        return ()
    first, *others = (*sharding.spec, None)
    if any(axis is not None for axis in others):
        raise ValueError(
            f"An array of shape {x.shape} is sharded as {sharding.spec}, but only rows "
            "(the first axis) can be."
        )
    if first is None:
        return ()
    return first if isinstance(first, tuple) else (first,)


def _spell(path: tuple) -> str:
    """How a user would name a leaf of (args, kwargs)."""
    which, *rest = path
    where = jax.tree_util.keystr(tuple(rest))
    return f"Argument {where}" if which.idx == 0 else f"Keyword argument {where}"


def _check_sizes(plate: Plate, k: int) -> None:
    name, n, m = plate
    if n % k:
        raise ValueError(
            f"plate '{name}' has {n} rows, which {k} devices cannot share evenly. "
            "Drop some, or add rows and mask them in the model."
        )
    if m % k:
        raise ValueError(
            f"plate '{name}' has subsample_size={m}, of which each of {k} devices "
            f"draws the same number: make it a multiple of {k}."
        )
    if m < min(2 * k, n):
        raise ValueError(
            f"plate '{name}' has subsample_size={m} on {k} devices: each must draw at "
            f"least two rows to tell their variance, {2 * k} in all."
        )


def check_axes(x: Any) -> Any:
    """``x``, unless its type is sharded, for which models are not written."""
    if isinstance(x, jax.Array) and any(jax.typeof(x).sharding.spec):
        raise ValueError(
            "The data are on a mesh with explicit axes, of which JAX would ask an "
            "`out_sharding` for each row that a model takes. Make it with "
            "`jax.sharding.Mesh(devices, names)`, or with `jax.make_mesh(..., "
            "axis_types=(jax.sharding.AxisType.Auto,) * len(names))`."
        )
    return x


class _own_rows(Messenger):
    """
    A model that was handed the rows of one device, whatever size its plate was given.

    Outermost of all handlers: plates and :class:`~numpyro_mhbt.plates.with_rows` have
    had their say.

    :param sizes: rows of each subsampled plate on this device.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.written: dict[str, int] = {}
        super().__init__()

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate" and msg["name"] in self.sizes:
            self.written[msg["name"]] = msg["args"][0]
        elif msg["type"] == "sample":
            for frame in msg["cond_indep_stack"]:
                if frame.name in self.sizes:
                    share = self.sizes[frame.name] / self.written[frame.name]
                    msg["scale"] = msg["scale"] if share == 1 else msg["scale"] * share

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        # A plate whose size is written as a number would refuse the rows of a device.
        event_dim = (
            msg["kwargs"].get("event_dim") if msg["type"] == "subsample" else None
        )
        if event_dim is None:
            return
        for frame in _PYRO_STACK:
            if not isinstance(frame, numpyro_plate) or frame.name not in self.sizes:
                continue
            size, axis = self.sizes[frame.name], frame.dim - event_dim
            shape = jnp.shape(msg["value"])
            if frame.size != size and len(shape) >= -axis and shape[axis] == size:
                msg["value"] = jnp.take(msg["value"], frame._indices, axis)
                msg["kwargs"] = {**msg["kwargs"], "event_dim": None}


def on_devices(
    fn: Callable,
    data: Data,
    *rest: Any,
    in_specs: Any = P(),  # noqa: B008
    out_specs: Any = P(),  # noqa: B008
) -> Any:
    """
    ``fn(data, *rest)``, on each device with its own rows if they are spread.

    :param in_specs: for ``rest``. Unless told otherwise all devices have it alike.
    :param out_specs: for what is returned, which must then be alike, too.
    """
    placement = data.placement
    if placement is None:
        return fn(data, *rest)
    leaves, tree = jax.tree.flatten((data.args, data.kwargs, data.params))
    is_array = [isinstance(x, jax.Array) for x in leaves]
    is_row = placement.rows + (False,) * (len(leaves) - len(placement.rows))
    arrays = [x for x, a in zip(leaves, is_array, strict=True) if a]
    specs = [
        P(placement.axes) if row else P()
        for row, a in zip(is_row, is_array, strict=True)
        if a
    ]
    plates = placement.local(data.plates)

    def here(arrays: list[jax.Array], rest: tuple) -> Any:
        left = iter(arrays)
        mine = [next(left) if a else x for x, a in zip(leaves, is_array, strict=True)]
        args, kwargs, params = jax.tree.unflatten(tree, mine)
        local = data._replace(
            args=args, kwargs=kwargs, params=params, plates=plates, axes=placement.axes
        )
        with _own_rows({plate.name: plate.size for plate in plates}):
            return fn(local, *rest)

    return jax.shard_map(
        here,
        mesh=placement.mesh,
        in_specs=(specs, in_specs),
        out_specs=out_specs,
        check_vma=False,  # it would refuse loops in models that do not know of it
    )(arrays, rest)


def everywhere(fn: Callable) -> Callable:
    """A function of data and of what all devices have alike, :func:`on_devices`."""

    def run(data: Data, *rest: Any, **options: Any) -> Any:
        return on_devices(lambda data, *rest: fn(data, *rest, **options), data, *rest)

    return run


def across(data: Data, tree: Any) -> Any:
    """The sum over devices, in one message; on one device the tree itself."""
    if not data.axes:
        return tree
    _, unravel = ravel_pytree(tree)
    return unravel(lax.psum(flatten(tree), data.axes))


def everyones(data: Data, tree: Any) -> Any:
    """What each device has, along a new first axis."""
    if not data.axes:
        return jax.tree.map(lambda x: x[None], tree)
    return lax.all_gather(tree, data.axes)


def agreed(data: Data, tree: Any) -> Any:
    """What the first device has: others may have come to another, with their rows."""
    if not data.axes:
        return tree

    def share(x: jax.Array) -> jax.Array:
        said = jnp.where(is_first(data), x, jnp.zeros_like(x))
        return lax.psum(said, data.axes).astype(x.dtype)

    return jax.tree.map(share, tree)


def is_first(data: Data) -> Any:
    """Whether this device speaks for those that have the same chains."""
    return lax.axis_index(data.axes) == 0 if data.axes else True


def own_key(data: Data, rng_key: jax.Array) -> jax.Array:
    """A key for what each device draws on its own."""
    if not data.axes:
        return rng_key
    return random.fold_in(rng_key, lax.axis_index(data.axes))


def own_share(data: Data) -> float:
    """What part a device counts of what all have alike."""
    return 1 / data.placement.num_shards if data.placement and data.axes else 1.0


def numbered(data: Data, batch: Batch, sign: int = 1) -> Batch:
    """Rows of this device by their numbers among all rows; with -1 the way back."""
    if not data.axes:
        return batch
    before = lax.axis_index(data.axes)
    return {p.name: batch[p.name] + sign * before * p.size for p in data.plates}


def check_arguments(data: Data, state: MHBTState) -> None:
    """Refuse to compile spread rows into a program, whole on each device."""
    if state.shared.placement is None or not isinstance(state.i, jax.core.Tracer):
        return
    spread = state.shared.placement.rows
    leaves = jax.tree.leaves((data.args, data.kwargs))
    if not any(
        isinstance(x, jax.core.Tracer) for x in itertools.compress(leaves, spread)
    ):
        raise ValueError(
            "Sharded data would be compiled into the program as constants, all of them "
            "on each device: use `MCMC(..., jit_model_args=True)`."
        )


def start_on_devices(fn: Callable, data: Data, setup: Setup, *chain: Any) -> Any:
    """
    ``fn(data, setup, *chain)``: the first state of chains, and whether the densities
    and the gradient by each site are finite.

    :param chain: a key, and values to start from or None; of several chains if keys.
    """
    placement = data.placement
    if placement is None:
        return fn(data, setup, *chain)

    def here(data: Data, setup: Setup, *chain: Any) -> Any:
        state, *finite = fn(data, agreed(data, setup), *chain)
        bad = jax.tree.map(lambda ok: jnp.sum(~ok), finite)
        bad = lax.psum(bad, placement.mesh.axis_names)
        state = state._replace(batch=numbered(data, state.batch))
        return state, *jax.tree.map(lambda number: number == 0, bad)

    specs = _state_specs(placement, None if is_prng_key(chain[0]) else len(chain[0]))
    return on_devices(
        here,
        data,
        setup,
        *chain,
        in_specs=(P(), *[specs.rng_key] * len(chain)),
        out_specs=(specs, P(), P()),
    )


def draw_on_devices(
    fn: Callable[[Data, MHBTState], MHBTState], data: Data, state: MHBTState
) -> MHBTState:
    """``fn(data, state)``, on each device with the rows and chains that it has."""
    placement = state.shared.placement
    if placement is None:
        return fn(data, state)

    def here(data: Data, state: MHBTState) -> MHBTState:
        state = state._replace(batch=numbered(data, state.batch, -1))
        state = fn(data, state)
        return state._replace(batch=numbered(data, state.batch))

    specs = _state_specs(placement, len(state.i) if jnp.ndim(state.i) else None)
    data = data._replace(placement=placement)
    return on_devices(here, data, state, in_specs=(specs,), out_specs=specs)


def _state_specs(placement: Placement, num_chains: int | None) -> Any:
    """Of each field: batches are with the rows, all else with the chains."""
    first: tuple = ()
    if num_chains is not None:
        first = (placement.chain_axes(num_chains) or None,)
    fields: dict[str, Any] = dict.fromkeys(MHBTState._fields, P(*first))
    return MHBTState(**(fields | {"batch": P(*first, placement.axes)}))
