"""
Data that stay on disk: a model indexes them, and the host reads its batch.

A step reads all files of a plate in one call, before the model runs
(:func:`fetch`), and is told with it which rows come next, which are then read by
another thread while this step computes. What is returned never depends on that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
import time
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_mhbt.sources import MappedFile, Source, open_source

if TYPE_CHECKING:
    from numpyro_mhbt.target import Data

try:
    # Half the time of `jax.pure_callback`, which makes arrays of JAX on the way.
    from jax.experimental.buffer_callback import buffer_callback
except ImportError:  # pragma: no cover
    buffer_callback = None  # type: ignore[assignment]

_WORKERS = 4
_LONG = 2e-4  # seconds: below it a thread takes longer to wake than to read
_MOST_AHEAD = 64  # batches that were announced and not asked for


class Rows:
    """An array whose rows are elsewhere until they are indexed."""

    shape: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        raise NotImplementedError

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, index: Any) -> jax.Array:
        raise NotImplementedError

    __iter__ = None

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"DiskRows of shape {self.shape} would be read whole. Inside the plate "
            "take its batch, `rows[idx]` or `numpyro.subsample(rows, event_dim)`; "
            "elsewhere read some rows, as `rows[:1000]`."
        )

    __array__ = __jax_array__ = _refuse


@jax.tree_util.register_static
class DiskRows(Rows):
    """
    An array on disk, for a model to read its batch from.

    Give it to :meth:`~numpyro.infer.mcmc.MCMC.run` in place of an array. In the model
    it has a ``shape``, a length and a ``dtype`` (that of ``jnp.asarray``: 32 bits
    unless JAX is told otherwise), and within a plate ``rows[idx]`` or
    ``numpyro.subsample(rows, event_dim)`` is the batch. Draws are those of the same
    data in memory. All passes over all rows go by chunks.

    Indexed by numbers or slices, as outside of models, it reads these rows. What would
    read all of them by accident is an error.

    :param source: a path (``.npy``, ``.zarr``, or ``.arrow`` and ``.feather`` not
        compressed); or a NumPy memmap, a Zarr array, an Arrow table or column, or
        whatever has a ``shape``, a ``dtype`` and rows to be indexed by a sorted array.
    :param columns: of an Arrow table: a name for a vector (or a matrix, if a column of
        lists), names for a matrix.
    :param bool prefetch: whether another thread may read the rows of the next step
        while the present one computes. It does where reading takes long enough.

    **Example**

    .. doctest::

        >>> import pathlib, tempfile
        >>> from jax import random
        >>> import numpy as np, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_mhbt import MHBT, DiskRows
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("N", len(y), subsample_size=100) as idx:
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=y[idx])
        >>> path = pathlib.Path(tempfile.mkdtemp(), "y.npy")
        >>> np.save(path, 3 + np.random.default_rng(0).standard_normal(10_000))
        >>> y = DiskRows(path)
        >>> y
        DiskRows(shape=(10000,), dtype=float32)
        >>> kernel = MHBT(model)
        >>> mcmc = MCMC(kernel, num_warmup=300, num_samples=500, progress_bar=False)
        >>> mcmc.run(random.key(0), y)
        >>> print(f"{mcmc.get_samples()['mu'].mean():.1f}")
        3.0
    """

    def __init__(
        self,
        source: Any,
        *,
        columns: str | Sequence[str] | None = None,
        prefetch: bool = True,
    ) -> None:
        self._source: Source = open_source(source, columns)
        self.shape = self._source.shape
        self.prefetch = prefetch
        if not self.shape or self._source.dtype.kind not in "biufc":
            raise TypeError(
                "DiskRows needs rows of numbers, got shape "
                f"{self.shape} and dtype {self._source.dtype}."
            )

    @property
    def dtype(self) -> np.dtype:
        return jax.dtypes.canonicalize_dtype(self._source.dtype)

    def __repr__(self) -> str:
        return f"DiskRows(shape={self.shape}, dtype={self.dtype})"

    def read(self, rows: np.ndarray) -> np.ndarray:
        """The given rows, of any shape and within bounds."""
        found = self._source.take(rows.ravel()) if rows.size else np.empty(0)
        return np.asarray(found, self.dtype).reshape(*rows.shape, *self.shape[1:])

    def fill(self, out: np.ndarray, rows: np.ndarray) -> None:
        """Put the given rows into an array, without another between where possible."""
        if isinstance(self._source, MappedFile) and self._source.dtype == out.dtype:
            self._source.take(rows.ravel(), out.reshape(rows.size, *self.shape[1:]))
        else:
            out[...] = self.read(rows)

    def __getitem__(self, index: Any) -> jax.Array:
        n = len(self)
        if isinstance(index, tuple):
            raise TypeError(
                "DiskRows is indexed by rows alone: `rows[idx][:, j]` rather than "
                "`rows[idx, j]`."
            )
        if isinstance(index, slice):
            return jnp.asarray(self.read(np.arange(*index.indices(n))))
        if isinstance(index, jax.core.Tracer):
            if not jnp.issubdtype(index.dtype, jnp.integer):
                raise TypeError(
                    f"DiskRows is indexed by row numbers, got {index.dtype}."
                )
            # Beyond the ends as JAX does.
            within = jnp.clip(jnp.where(index < 0, index + n, index), 0, n - 1)
            return _Host(((self, 0),))(within)[0]
        rows = np.asarray(index)
        if rows.dtype == bool:
            (rows,) = np.nonzero(rows)
        if rows.dtype.kind not in "iu":
            raise TypeError(f"DiskRows is indexed by row numbers, got {index!r:.80}.")
        if rows.size and not (-n <= rows.min() and rows.max() < n):
            raise IndexError(f"Row out of bounds: there are {n}.")
        return jnp.asarray(self.read(np.where(rows < 0, rows + n, rows)))


class _Held(Rows):
    """:class:`DiskRows` of which some rows were read already."""

    def __init__(self, file: DiskRows) -> None:
        self.file, self.shape = file, file.shape
        self.batches: list[tuple[jax.Array, jax.Array]] = []

    @property
    def dtype(self) -> np.dtype:
        return self.file.dtype

    def __getitem__(self, index: Any) -> jax.Array:
        # The very array that the plate hands to the model, so that nothing is compared.
        for rows, values in self.batches:
            if index is rows:
                return values
        return self.file[index]


class _Host:
    """
    The reading side of a compiled program.

    :param files: each with the number of the argument that has its rows. As many
        arguments again may follow: the rows of the next call.
    """

    def __init__(self, files: tuple[tuple[DiskRows, int], ...]) -> None:
        self._files = files
        self._num_plates = 1 + max(place for _, place in files)
        self._ahead: dict[tuple[bytes, ...], Future] = {}
        self._seconds = 0.0  # of the last reading

    def __call__(self, *rows: jax.Array) -> list[jax.Array]:
        shapes = [
            jax.ShapeDtypeStruct((*rows[place].shape, *file.shape[1:]), file.dtype)
            for file, place in self._files
        ]
        if buffer_callback is not None and jax.default_backend() == "cpu":
            call = buffer_callback(self._fill, shapes, vmap_method="broadcast_all")
            return call(*rows)
        return jax.pure_callback(self._find, shapes, *rows, vmap_method="broadcast_all")

    def _find(self, *rows: Any) -> list[np.ndarray]:
        arrays = [np.asarray(x) for x in rows]
        out = self._make_room(arrays)
        self._fill(None, out, *arrays)
        return out

    def _fill(self, _: Any, out: Sequence[Any], *rows: Any) -> None:
        arrays, buffers = [np.asarray(x) for x in rows], [np.asarray(x) for x in out]
        now, later = arrays[: self._num_plates], arrays[self._num_plates :]
        announced = self._ahead.pop(_key(now), None) if self._ahead else None
        if later and self._seconds > _LONG:
            # The memory of arguments is not ours when we have returned.
            later = [x.copy() for x in later]
            room = self._make_room(later)
            self._ahead[_key(later)] = _workers().submit(self._read, later, room)
            if len(self._ahead) > _MOST_AHEAD:
                # Of a chain that went another way.
                self._ahead.pop(next(iter(self._ahead.copy())), None)
        if announced is None or announced.cancel():
            self._read(now, buffers)
        else:
            for buffer, values in zip(buffers, announced.result(), strict=True):
                buffer[...] = values

    def _make_room(self, rows: list[np.ndarray]) -> list[np.ndarray]:
        return [
            np.empty((*rows[place].shape, *file.shape[1:]), file.dtype)
            for file, place in self._files
        ]

    def _read(self, rows: list[np.ndarray], out: list[np.ndarray]) -> list[np.ndarray]:
        begin = time.perf_counter()
        for (file, place), buffer in zip(self._files, out, strict=True):
            file.fill(buffer, rows[place])
        self._seconds = time.perf_counter() - begin
        return out


def _key(rows: list[np.ndarray]) -> tuple[bytes, ...]:
    return tuple(x.tobytes() for x in rows)


@cache
def _workers() -> ThreadPoolExecutor:
    """Threads that read ahead."""
    return ThreadPoolExecutor(_WORKERS, thread_name_prefix="ahead")


def _is_file(x: Any) -> bool:
    return isinstance(x, DiskRows)


def files_of(tree: Any) -> list[DiskRows]:
    """The files among the arguments of a model."""
    leaves = jax.tree.leaves(tree, is_leaf=_is_file)
    return list(dict.fromkeys(filter(_is_file, leaves)))


def reads_ahead(data: Data) -> bool:
    """Whether it helps to know the next batch."""
    files = files_of((data.args, data.kwargs))
    return bool(files) and all(file.prefetch for file in files)


def fetch(
    data: Data,
    batch: Mapping[str, jax.Array],
    ahead: Mapping[str, jax.Array] | None = None,
) -> Data:
    """
    The data, with the rows of ``batch`` read from files in one call.

    :param ahead: the batch of the next call, if known.
    """
    wanted = [
        (file, plate.name)
        for file in files_of((data.args, data.kwargs))
        for plate in data.plates
        if plate.size == len(file)
    ]
    if not wanted:
        return data
    names = list(dict.fromkeys(name for _, name in wanted))
    host = _Host(tuple((file, names.index(name)) for file, name in wanted))
    rows = [jnp.asarray(batch[name]) for name in names]
    found = host(*rows, *(ahead[name] for name in names if ahead))
    held = {file: _Held(file) for file, _ in wanted}
    for (file, name), values in zip(wanted, found, strict=True):
        held[file].batches.append((batch[name], values))
    args, kwargs = jax.tree.map(
        lambda x: held.get(x, x) if _is_file(x) else x,
        (data.args, data.kwargs),
        is_leaf=_is_file,
    )
    return data._replace(args=args, kwargs=kwargs)
