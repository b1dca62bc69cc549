"""Files of rows: which rows of them are where, and how they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
import mmap
import os
from pathlib import Path
import time
from typing import Any, Protocol
import weakref

import numpy as np

_COLD = 5e-3  # seconds for a batch, which then did not come from memory


class Source(Protocol):
    """Rows on disk."""

    shape: tuple[int, ...]
    dtype: np.dtype

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The given rows (one axis, within bounds), in memory."""


def open_source(source: Any, columns: str | Sequence[str] | None) -> Source:
    """:class:`Source` of a path, or of an array-like that is open already."""
    if isinstance(source, str | os.PathLike):
        return _open_path(Path(os.fspath(source)), columns)
    if type(source).__module__.startswith("pyarrow"):
        return Arrow(_select(source, columns))
    _check_no_columns(source, columns)
    if isinstance(source, np.memmap) and source.filename and source.mode != "c":
        return _reopen(source)
    if not all(hasattr(source, x) for x in ("shape", "dtype", "__getitem__")):
        raise TypeError(
            "DiskRows needs a path, or something with a shape, a dtype and rows to "
            f"index such as a NumPy memmap, a Zarr array or an Arrow table, got "
            f"{type(source).__name__}."
        )
    return Indexed(source)


def _open_path(path: Path, columns: str | Sequence[str] | None) -> Source:
    if path.suffix in (".arrow", ".feather"):
        return ArrowFile(path, columns)
    _check_no_columns(path, columns)
    if path.suffix == ".npy":
        return _reopen(np.load(path, mmap_mode="r"))
    if path.suffix == ".zarr":
        import zarr

        return Indexed(zarr.open_array(path, mode="r"))
    raise ValueError(
        f"DiskRows opens .npy, .zarr, .arrow and .feather, not '{path.name}': open it "
        "yourself, for example with `np.memmap`, and give what you get."
    )


def _check_no_columns(source: Any, columns: Any) -> None:
    if columns is not None:
        raise ValueError(f"`columns` are those of an Arrow table, got {source!r:.80}.")


class Indexed:
    """What can be indexed by sorted rows: Zarr and HDF5 arrays, and arrays at large."""

    def __init__(self, source: Any) -> None:
        self.shape, self.dtype = tuple(source.shape), np.dtype(source.dtype)
        self._source = source

    def take(self, rows: np.ndarray) -> np.ndarray:
        if isinstance(self._source, np.ndarray):
            return self._source.take(rows, axis=0, mode="clip")
        first, last = int(rows[0]), int(rows[-1])
        if _are_contiguous(rows):
            return np.asarray(self._source[first : last + 1])
        some, place = np.unique(rows, return_inverse=True)
        return np.asarray(getattr(self._source, "oindex", self._source)[some])[place]


class MappedFile:
    """An array in a file, by a memory map of our own."""

    def __init__(
        self,
        path: str,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        dtype: np.dtype,
    ) -> None:
        self._where = path, offset, shape, strides, dtype
        self.shape, self.dtype = shape, dtype
        self._file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        weakref.finalize(self, os.close, self._file)
        self._map = mmap.mmap(self._file, 0, access=mmap.ACCESS_READ)
        self._array: np.ndarray = np.ndarray(shape, dtype, self._map, offset, strides)
        # Or the system reads many pages around each row.
        if hasattr(mmap, "MADV_RANDOM"):  # not on Windows
            self._map.madvise(mmap.MADV_RANDOM)
        self._is_cold = False

    def __reduce__(self) -> tuple:
        return MappedFile, self._where

    def _ask_for(self, begin: int, length: int) -> None:
        """Let the system read bytes while we go on."""
        # Not `madvise`, during which Python holds its lock.
        if hasattr(os, "posix_fadvise"):  # on Linux
            os.posix_fadvise(self._file, begin, length, os.POSIX_FADV_WILLNEED)

    def take(self, rows: np.ndarray, out: np.ndarray | None = None) -> np.ndarray:
        if out is None:
            out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        if _are_contiguous(rows) and self._array.flags.c_contiguous:
            _, offset, _, strides, _ = self._where
            first, last = int(rows[0]), int(rows[-1]) + 1
            self._ask_for(offset + first * strides[0], (last - first) * strides[0])
            out[...] = self._array[first:last]
            return out
        started = time.perf_counter()
        if self._is_cold:
            self._ask_for_pages(rows)
        self._array.take(rows, axis=0, out=out, mode="clip")
        self._is_cold = time.perf_counter() - started > _COLD
        return out

    def _ask_for_pages(self, rows: np.ndarray) -> None:
        """Name all pages at once, since a disk serves many requests as fast as one."""
        _, offset, shape, strides, dtype = self._where
        begins = offset + strides[0] * rows.astype(np.int64)
        edges = _find_edges(shape, strides, dtype.itemsize)
        pages = np.unique(np.add.outer(begins, edges) // mmap.PAGESIZE)
        for begin in (pages * mmap.PAGESIZE).tolist():
            self._ask_for(begin, 1)


def _find_edges(shape: Sequence[int], strides: Sequence[int], size: int) -> np.ndarray:
    """Bytes of a row, such that no page has some of it and none of them."""
    places = np.zeros(1, np.int64)
    for length, stride in zip(shape[1:], strides[1:], strict=True):
        places = np.add.outer(places, stride * np.arange(length)).ravel()
    places.sort()
    # A stretch of a page's length lies on two at most: those of its ends.
    starts = np.unique(places // mmap.PAGESIZE, return_index=True)[1]
    ends = np.append(starts[1:], len(places)) - 1
    return np.append(places[starts], places[ends] + size - 1)


def _are_contiguous(rows: np.ndarray) -> bool:
    count = len(rows)
    if count < 2 or int(rows[-1]) - int(rows[0]) != count - 1:
        return False
    return bool((np.diff(rows) == 1).all())


def _reopen(array: np.memmap) -> MappedFile:
    # A view knows the file, but only the place in it of what it is a view of.
    address: Callable = lambda x: x.__array_interface__["data"][0]  # noqa: E731
    begin = address(np.frombuffer(array._mmap, np.uint8))  # type: ignore[attr-defined]
    offset = array.offset - array.offset % mmap.ALLOCATIONGRANULARITY
    return MappedFile(
        str(Path(array.filename).resolve()),  # type: ignore[arg-type]
        offset + address(array) - begin,
        array.shape,
        array.strides,
        array.dtype,
    )


class Arrow:
    """
    A column of Arrow (numbers, or lists of fixed size), or a table of such columns.

    A column is a vector, or a matrix if of lists; a table is a matrix.
    """

    def __init__(self, columns: Any) -> None:
        is_table = hasattr(columns, "column_names")
        names = columns.column_names if is_table else ["the column"]
        parts = columns.columns if is_table else [columns]
        self._columns = [_Column(n, part) for n, part in zip(names, parts, strict=True)]
        self.dtype = np.result_type(*(column.dtype for column in self._columns))
        num_rows, *rest = self._columns[0].shape
        if is_table:
            if any(len(column.shape) > 1 for column in self._columns):
                raise ValueError(
                    "DiskRows: a table with a column of lists is no matrix. Make one "
                    "of each column, by its name in `columns`."
                )
            rest = [len(parts)]
        self.shape = (num_rows, *rest)
        self._is_table = is_table

    def __reduce__(self) -> tuple:
        raise TypeError(
            "DiskRows of an open Arrow table does not know its file, and is not "
            "pickled. Make it by path: `DiskRows('rows.arrow', columns=...)`."
        )

    def take(self, rows: np.ndarray) -> np.ndarray:
        if not self._is_table:
            return self._columns[0].take(rows)
        found = np.empty((len(rows), len(self._columns)), self.dtype)
        for j, column in enumerate(self._columns):
            found[:, j] = column.take(rows)
        return found


class ArrowFile(Arrow):
    """An Arrow IPC file, memory-mapped."""

    def __init__(self, path: Path, columns: str | Sequence[str] | None) -> None:
        import pyarrow as pa

        self._where = path.resolve(), columns
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        before = pa.total_allocated_bytes()
        first = reader.get_batch(0) if reader.num_record_batches else None
        if first is not None and pa.total_allocated_bytes() > before:
            raise ValueError(
                f"'{path.name}' is compressed, and would be unpacked into memory. "
                "Write it without compression."
            )
        super().__init__(_select(reader.read_all(), columns))

    def __reduce__(self) -> tuple:
        return ArrowFile, self._where


def _select(table: Any, columns: str | Sequence[str] | None) -> Any:
    if columns is None:
        return table
    if not hasattr(table, "column_names"):
        raise ValueError("`columns` are those of a table, and this is one column.")
    if isinstance(columns, str):
        return table.column(columns)
    return table.select(list(columns))


class _Column:
    """A column in pieces, as Arrow files have them, each a view of memory."""

    def __init__(self, name: str, column: Any) -> None:
        pieces = getattr(column, "chunks", [column])
        if column.null_count:
            raise ValueError(
                f"DiskRows: {column.null_count} values of '{name}' are null. Fill "
                "them, and mask them in the model."
            )
        self._pieces = [_view(name, piece) for piece in pieces if len(piece)]
        if not self._pieces:
            raise ValueError(f"DiskRows: '{name}' has no rows.")
        self._ends = np.cumsum([len(piece) for piece in self._pieces])
        self.dtype = self._pieces[0].dtype
        self.shape = (int(self._ends[-1]), *self._pieces[0].shape[1:])

    def take(self, rows: np.ndarray) -> np.ndarray:
        if len(self._pieces) == 1:
            return self._pieces[0].take(rows, axis=0, mode="clip")
        found = np.empty((len(rows), *self.shape[1:]), self.dtype)
        which = np.searchsorted(self._ends, rows, side="right")
        order = np.argsort(which, kind="stable")
        pieces, starts = np.unique(which[order], return_index=True)
        for piece, places in zip(pieces, np.split(order, starts[1:]), strict=True):
            view = self._pieces[piece]
            local = rows[places] - (self._ends[piece] - len(view))
            found[places] = view.take(local, axis=0, mode="clip")
        return found


def _view(name: str, piece: Any) -> np.ndarray:
    import pyarrow as pa

    shape = [len(piece)]
    if pa.types.is_fixed_size_list(piece.type):
        shape.append(piece.type.list_size)
        piece = piece.flatten()
    try:
        return piece.to_numpy(zero_copy_only=True).reshape(shape)
    except (pa.ArrowInvalid, NotImplementedError) as error:
        raise TypeError(
            f"DiskRows: '{name}' of type {piece.type} does not lie in the file as "
            "numbers do in memory. Store it as integers or floats (booleans as uint8)."
        ) from error
