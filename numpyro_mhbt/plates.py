"""Subsampled plates: find them, draw their rows in O(m), see them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
import math
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.handlers import seed, substitute, trace
from numpyro.infer import init_to_sample
from numpyro.primitives import _PYRO_STACK, Messenger, plate

from numpyro_mhbt.disk import Rows as RowsOnDisk

Batch = Mapping[str, jax.Array]
"""Rows in use, keyed by the name of the subsampled plate."""

# Below this size a sort is cheap and uniform over all subsets; above it the keyed
# bijection is indistinguishable from uniform (see tests/test_plates.py).
_SORT_BELOW = 512
_ROUNDS = 6
_POOL = 2**12
_CHUNK, _LEAST, _FEW = 2**14, 2**11, 16
_MOST_ROWS = 2**31 - 1


class Plate(NamedTuple):
    """A plate that was given a ``subsample_size``."""

    name: str
    size: int
    subsample_size: int


Rows = dict[tuple[Plate, ...], jax.Array]
"""Log-likelihood by row, one axis for each plate; sites that share plates added up."""


class _on_rows(Messenger):
    """Base of the handlers that decide which rows a plate has."""

    def rows(self, name: str, size: int) -> jax.Array | None:
        raise NotImplementedError

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "plate":
            name, (size, subsample_size) = msg["name"], msg["args"]
            if subsample_size is None:
                return
            if size > _MOST_ROWS:
                raise ValueError(
                    f"plate '{name}' has {size} rows, and rows are counted with 32 "
                    f"bits: at most {_MOST_ROWS}. Make several plates of them."
                )
            rows = self.rows(name, size)
            if rows is None and not 0 < subsample_size <= size:
                raise ValueError(
                    f"plate '{name}' has subsample_size={subsample_size}, which must "
                    f"lie between 1 and its size {size}."
                )
            if rows is not None:
                msg["args"], msg["value"] = (size, rows.shape[0]), rows
        elif msg["type"] == "subsample" and msg["value"] is None:
            # Data that are not given, as in prediction: there is nothing to take from.
            msg.update(fn=_nothing, args=(), kwargs={"event_dim": None})

    def postprocess_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "subsample" and isinstance(msg["value"], RowsOnDisk):
            inside = _PYRO_STACK[_PYRO_STACK.index(self) :]
            around = [frame for frame in inside if isinstance(frame, plate)]
            # Done here, since plates would take it for an array.
            msg["value"] = _subsample(msg["value"], around, msg["kwargs"]["event_dim"])
            msg["kwargs"] = {"event_dim": None}


def _nothing(event_dim: None) -> None:
    return None


def _subsample(values: RowsOnDisk, plates: list[plate], event_dim: int) -> Any:
    """What :func:`numpyro.subsample` makes of an array, of rows on disk."""
    axes = {frame.dim - event_dim + values.ndim: frame for frame in plates}
    for axis, frame in axes.items():
        if axis >= 0 and values.shape[axis] not in (1, frame.size):
            raise ValueError(
                f"numpyro.subsample(..., event_dim={event_dim}) of shape "
                f"{values.shape} does not fit plate '{frame.name}' of size "
                f"{frame.size}."
            )
    if 0 not in axes or len(values) != axes[0].size:
        raise ValueError(
            f"numpyro.subsample(..., event_dim={event_dim}) of rows on disk of shape "
            f"{values.shape} stands in no plate that they are the rows of."
        )
    taken = values[axes.pop(0)._indices]
    for axis, frame in axes.items():
        if axis > 0 and values.shape[axis] > 1 and frame.subsample_size < frame.size:
            taken = jnp.take(taken, frame._indices, axis)
    return taken


class full_data(_on_rows):
    """
    The same model with every subsampled plate whole.

    ArviZ, :class:`~numpyro.infer.util.Predictive` and
    :func:`~numpyro.infer.util.log_likelihood` then see all rows in their order
    instead of one random batch.

    :param fn: a NumPyro model.

    **Example**

    .. doctest::

        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro import handlers
        >>> from numpyro_mhbt import full_data
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal())
        ...     with numpyro.plate("N", len(y), subsample_size=2) as idx:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[idx])
        >>> whole = handlers.seed(full_data(model), 0)
        >>> handlers.trace(whole).get_trace(jnp.arange(5.0))["y"]["value"].tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0]
    """

    def rows(self, name: str, size: int) -> jax.Array:
        # Concrete even where the model is traced, since NumPy data can be indexed by
        # nothing else.
        with jax.ensure_compile_time_eval():
            return jnp.arange(size)


class with_rows(_on_rows):
    """The same model on the given rows of its plates (any number of them)."""

    def __init__(self, fn: Callable, batch: Batch) -> None:
        self.batch = batch
        super().__init__(fn)

    def rows(self, name: str, size: int) -> jax.Array | None:
        return self.batch.get(name)


def structure(model: Callable, args: tuple, kwargs: dict) -> dict[str, dict[str, Any]]:
    """
    What each site of the model is and where it stands, without computing anything.

    The result is a trace whose values, distributions and scales are shapes only.
    """
    sites: dict[str, dict[str, Any]] = {}

    def record() -> None:
        seeded = seed(with_rows(model, {}), random.key(0))
        started = substitute(seeded, substitute_fn=init_to_sample)
        sites.update(trace(started).get_trace(*args, **kwargs))

    try:
        jax.eval_shape(record)
    except jax.errors.ConcretizationTypeError as error:
        leaves = jax.tree.leaves((args, kwargs))
        if any(isinstance(x, jax.core.Tracer) and jnp.ndim(x) == 0 for x in leaves):
            raise TypeError(
                "`jit_model_args=True` makes arrays of all numbers among the model's "
                "arguments, but the model needs one as a number, perhaps for the size "
                "of a plate. Bind it before: `functools.partial(model, "
                "batch_size=1000)`."
            ) from error
        raise
    return sites


def find_plates(sites: Mapping[str, Mapping[str, Any]]) -> tuple[Plate, ...]:
    """The plates of a :func:`structure` that were given a ``subsample_size``."""
    return tuple(
        Plate(name, *site["args"])
        for name, site in sites.items()
        if site["type"] == "plate" and site["args"][1] is not None
    )


def plates_of(site: Mapping[str, Any], plates: tuple[Plate, ...]) -> tuple[Plate, ...]:
    """Those of ``plates`` in which the site stands."""
    names = {frame.name for frame in site["cond_indep_stack"]}
    return tuple(plate for plate in plates if plate.name in names)


def is_subsampled(plates: tuple[Plate, ...]) -> bool:
    """Whether any of the plates leaves rows out."""
    return any(plate.subsample_size < plate.size for plate in plates)


def first_rows(plates: tuple[Plate, ...]) -> Batch:
    """The batch of the first rows."""
    return {plate.name: jnp.arange(plate.subsample_size) for plate in plates}


def draw_batch(rng_key: jax.Array, plates: tuple[Plate, ...]) -> Batch:
    """A fresh batch: rows of each plate, uniformly without replacement."""
    if len(plates) == 1:
        (plate,) = plates
        return {plate.name: draw_rows(rng_key, plate.size, plate.subsample_size)}
    keys = random.split(rng_key, max(len(plates), 1))
    return {
        plate.name: draw_rows(key, plate.size, plate.subsample_size)
        for plate, key in zip(plates, keys, strict=False)
    }


def pool(plates: tuple[Plate, ...]) -> Batch:
    """More rows than a batch has, which may be too few to show their variance."""
    room = _POOL if len(plates) == 1 else 2
    sizes = (min(p.size, max(p.subsample_size, room)) for p in plates)
    wide = (p._replace(subsample_size=m) for p, m in zip(plates, sizes, strict=True))
    return draw_batch(random.key(1), tuple(wide))


def few_batches(group: Iterable[Plate]) -> int:
    """Rows at once: what fits in memory for a batch should do so for a few of them."""
    batch = math.prod(plate.subsample_size for plate in group)
    return max(batch, min(max(_FEW * batch, _LEAST), _CHUNK))


def next_batch(
    rng_key: jax.Array, batch: Batch, plates: tuple[Plate, ...], num_blocks: int
) -> Batch:
    """
    The batch with one of ``num_blocks`` parts of each plate drawn anew.

    Rows stay distinct, and the way back is as likely as the way there.
    """
    if num_blocks == 1:
        return draw_batch(rng_key, plates)
    keys = random.split(rng_key, max(len(plates), 1))
    return {
        plate.name: _next_rows(key, batch[plate.name], plate.size, num_blocks)
        for plate, key in zip(plates, keys, strict=False)
    }


def _next_rows(rng_key: jax.Array, rows: jax.Array, n: int, num_blocks: int) -> Any:
    m = rows.shape[0]
    if m == n:
        return rows
    key_start, key_rows = random.split(rng_key)
    # A window of the rows, seen as a circle, so that `num_blocks` need not divide m.
    kept = jnp.roll(rows, random.randint(key_start, (), 0, m))[-(-m // num_blocks) :]
    # Of m distinct candidates enough are left when those kept are taken out.
    candidates = draw_rows(key_rows, n, m)
    is_kept = are_among(candidates, jnp.sort(kept))
    fresh = candidates[jnp.argsort(is_kept, stable=True)]
    return jnp.concatenate([fresh[: m - kept.size], kept])


def are_among(rows: jax.Array, some: jax.Array) -> jax.Array:
    """Which of ``rows`` are in ``some``, which are sorted."""
    place = jnp.searchsorted(some, rows)
    return some[jnp.minimum(place, some.size - 1)] == rows


def draw_rows(rng_key: jax.Array, n: int, m: int) -> jax.Array:
    """
    ``m`` distinct rows out of ``n``, uniformly, in O(m) time and memory.

    Rows 0 to m - 1 are sent through a keyed bijection of {0, ..., n - 1}: an
    alternating (mixed radix) Feistel network on pairs (l, r) in Z_a x Z_b, where
    a b is the smallest product not below n. What falls into the small overhang
    beyond n is sent through again (cycle walking), which keeps the map a bijection.
    """
    if m == n:
        return jnp.arange(n)
    if n <= _SORT_BELOW:
        return random.permutation(rng_key, n)[:m]
    a, b = _radices(n)
    *round_keys, shift = random.bits(rng_key, (_ROUNDS + 1,), jnp.uint32)

    def permute(x: jax.Array) -> jax.Array:
        left, right = x % np.uint32(a), x // np.uint32(a)
        for i, key in enumerate(round_keys):
            if i % 2 == 0:
                left = _wrap(left + _hash(right ^ key) % np.uint32(a), a)
            else:
                right = _wrap(right + _hash(left ^ key) % np.uint32(b), b)
        return left + np.uint32(a) * right

    rows = permute(jnp.arange(m, dtype=jnp.uint32))
    if a * b > n:
        rows = lax.while_loop(
            lambda x: jnp.any(x >= n), lambda x: jnp.where(x >= n, permute(x), x), rows
        )
    # The random shift makes the chance of each single row exactly m / n. To XLA a
    # remainder is dear enough to be taken once: with `_wrap` here it would draw rows
    # within the gather, anew for each column.
    return ((rows + shift % np.uint32(n)) % np.uint32(n)).astype(jnp.int32)


def _radices(n: int) -> tuple[int, int]:
    """a <= b with a b >= n, the overhang smallest, neither far from sqrt(n)."""
    root = int(np.sqrt(n))
    a = np.arange(max(root // 2, 1), root + 1)
    b = -(-n // a)
    best = np.argmin(a * b)
    return int(a[best]), int(b[best])


def _wrap(x: jax.Array, n: int) -> jax.Array:
    """x modulo n for x below 2 n: if x is below n, the difference wraps around."""
    return jnp.minimum(x, x - np.uint32(n))


def _hash(x: jax.Array) -> jax.Array:
    """Wellons' low-bias 32-bit integer hash ("lowbias32")."""
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)
