"""One pass over all rows, in chunks: bounded memory, and a bar when it is long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm.auto import tqdm

from numpyro_mhbt.control import Reference, remainder
from numpyro_mhbt.disk import fetch
from numpyro_mhbt.mesh import across, everyones, everywhere
from numpyro_mhbt.plates import Batch, Plate, Rows, few_batches
from numpyro_mhbt.target import Data, log_terms

_MIN_CHUNK = 64
_MEMORY = 2**22
PATIENCE = 2.0  # seconds before a bar is shown

Group = tuple[Plate, ...]


def sum_over_rows(
    program: Callable,
    data: Data,
    z: dict[str, Any],
    *rest: Any,
    group: Group,
    what: str,
    width: int,
) -> Any:
    """
    Sum, in float64, of what ``program`` returns for each chunk of rows of ``group``.

    :param program: function of ``data``, ``z``, first rows of the chunk and ``rest``,
        with options ``group`` and ``sizes``.
    :param what: said beside the progress bar.
    :param width: numbers that the program holds for each row.
    """
    result = None
    for part in by_chunk(program, data, z, *rest, group=group, what=what, width=width):
        part = jax.tree.map(lambda x: np.asarray(x, np.float64), part)
        result = part if result is None else jax.tree.map(np.add, result, part)
    return result


def by_chunk(
    program: Callable,
    data: Data,
    z: dict[str, Any],
    *rest: Any,
    group: Group,
    what: str,
    width: int,
) -> Iterator[Any]:
    """What ``program`` returns for each chunk, as for :func:`sum_over_rows`."""
    room = min(_MEMORY // width, few_batches(group))
    sizes = _chunk_sizes(group, max(room, _MIN_CHUNK))
    starts = list(_starts(group, sizes))
    for start in tqdm(starts, desc=what, delay=PATIENCE, leave=False):
        yield program(data, z, jnp.array(start), *rest, group=group, sizes=sizes)


def _chunk_sizes(group: Group, room: int) -> tuple[int, ...]:
    sizes = []
    for plate in reversed(group):
        sizes.append(min(plate.size, max(room, 1)))
        room //= sizes[-1]
    return tuple(reversed(sizes))


def _starts(group: Group, sizes: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    return product(
        *(range(0, plate.size, size) for plate, size in zip(group, sizes, strict=True))
    )


def groups_of(model: Callable, data: Data, z: dict[str, Any]) -> tuple[Group, ...]:
    """The sets of plates that rows of the likelihood stand in, as a device has them."""
    one_row = {plate.name: jnp.arange(1) for plate in data.plates}

    def rows(data: Data, z: dict[str, Any]) -> Rows:
        return log_terms(model, data, z, one_row).rows

    return tuple(jax.eval_shape(lambda: everywhere(rows)(data, z)))


def _chunk(
    data: Data, start: jax.Array, group: Group, sizes: tuple[int, ...]
) -> tuple[Data, dict[str, jax.Array], jax.Array]:
    """Data and rows of a chunk, and which of them no chunk before has had."""
    batch = {plate.name: jnp.arange(1) for plate in data.plates}
    fresh = jnp.ones((1,) * len(group), bool)
    for axis, (plate, size) in enumerate(zip(group, sizes, strict=True)):
        # The last chunk reaches back, so that all have one shape.
        rows = jnp.minimum(start[axis], plate.size - size) + jnp.arange(size)
        batch[plate.name] = rows
        others = tuple(a for a in range(len(group)) if a != axis)
        fresh = fresh & jnp.expand_dims(rows >= start[axis], others)
    return fetch(data, batch), batch, fresh


def derivatives(
    data: Data,
    start: jax.Array,
    z: jax.Array,
    *,
    model: Callable,
    unravel: Callable,
    order: int,
    group: Group,
    sizes: tuple[int, ...],
) -> tuple[jax.Array, ...]:
    """Gradient, and Hessian for order 2, of the log-likelihood of a chunk."""
    data, batch, fresh = _chunk(data, start, group, sizes)

    def log_likelihood(z: jax.Array) -> jax.Array:
        values = log_terms(model, data, unravel(z), batch).rows[group]
        return jnp.sum(jnp.where(fresh, values, 0.0))

    grad = jax.grad(log_likelihood)
    found = (grad(z),) if order == 1 else (grad(z), jax.jacfwd(grad)(z))
    return across(data, found)


def moments(
    data: Data,
    start: jax.Array,
    reference: Reference,
    points: jax.Array,
    *,
    model: Callable,
    unravel: Callable,
    group: Group,
    sizes: tuple[int, ...],
) -> jax.Array:
    """
    Sums of the first four powers of what the expansion misses, at each point.

    The first axis is that of devices, whose rows are drawn apart from others.
    """
    missed, data, _ = _misses(data, start, reference, model, unravel, group, sizes)

    def powers(z: jax.Array) -> jax.Array:
        found = missed(z)
        return jnp.stack([jnp.sum(found**p) for p in (1, 2, 3, 4)])

    return everyones(data, jax.lax.map(powers, points))


def squares(
    data: Data,
    start: jax.Array,
    reference: Reference,
    points: jax.Array,
    *,
    model: Callable,
    unravel: Callable,
    group: Group,
    sizes: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Rows of a chunk, and the square of what is missed of each, mean over points."""
    missed, _, batch = _misses(data, start, reference, model, unravel, group, sizes)
    found = jax.lax.map(lambda z: missed(z) ** 2, points)
    return batch[group[0].name], jnp.mean(jnp.where(found < jnp.inf, found, 0.0), 0)


def _misses(
    data: Data,
    start: jax.Array,
    reference: Reference,
    model: Callable,
    unravel: Callable,
    group: Group,
    sizes: tuple[int, ...],
) -> tuple[Callable[[jax.Array], jax.Array], Data, Batch]:
    """What is missed of each row of a chunk, 0 for those counted elsewhere."""
    data, batch, fresh = _chunk(data, start, group, sizes)

    def rows_at(z: jax.Array) -> Rows:
        return log_terms(model, data, unravel(z), batch).rows

    def missed(z: jax.Array) -> jax.Array:
        rows, _ = remainder(rows_at(z), rows_at, reference, z)
        return jnp.where(fresh, reference.without(rows, batch)[group], 0.0)

    return missed, data, batch


def gains(
    data: Data,
    start: jax.Array,
    points: jax.Array,
    *,
    model: Callable,
    unravel: Callable,
    group: Group,
    sizes: tuple[int, ...],
) -> jax.Array:
    """Log-likelihood of a chunk at each point, less that at the first."""
    data, batch, fresh = _chunk(data, start, group, sizes)

    def rows_at(z: jax.Array) -> jax.Array:
        return log_terms(model, data, unravel(z), batch).rows[group]

    first = rows_at(points[0])
    found = jax.lax.map(
        lambda z: jnp.sum(jnp.where(fresh, rows_at(z) - first, 0.0)), points
    )
    return across(data, found)


def cumulants(sums: np.ndarray, plate: Plate, temperature: float) -> np.ndarray:
    """
    Second to fourth cumulant of the tempered log-density over batches.

    Of independent rows: the finite-population factor (1 - m/n) is applied to each.

    :param sums: of the first four powers over all rows of the plate (or of what of it a
        device has), along the last axis.
    """
    n, m = plate.size, plate.subsample_size
    m1, m2, m3, m4 = np.moveaxis(sums / n, -1, 0)
    second = m2 - m1**2
    third = m3 - 3 * m1 * m2 + 2 * m1**3
    fourth = m4 - 4 * m1 * m3 + 6 * m1**2 * m2 - 3 * m1**4 - 3 * second**2
    weight = n / m / temperature
    scale = m * (1 - m / n) * np.array([weight**2, weight**3, weight**4])
    return np.stack([second, third, fourth], -1) * scale
