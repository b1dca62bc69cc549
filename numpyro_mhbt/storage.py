"""Trees of arrays in files that are either whole or not there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
import dataclasses
import hashlib
import importlib
import json
import os
from pathlib import Path
from typing import Any
import zipfile

import jax
from jax import random
import jax.numpy as jnp
import numpy as np

_FORMAT = "numpyro_mhbt checkpoint"
_VERSION = 1
_OURS = ("numpyro_mhbt", "numpyro")
_LOCK, _PART = ".lock", ".part"


def save(path: Path, meta: dict[str, Any], tree: Any) -> str:
    """
    Write ``tree`` and what JSON can hold, or leave the file at ``path`` as it was.

    :return: a digest of the content.
    """
    arrays: dict[str, np.ndarray] = {}
    head = {"meta": meta, "tree": _encode(tree, "", arrays)}
    digest = _digest(head, arrays)
    head |= {"format": _FORMAT, "version": _VERSION, "digest": digest}
    scratch = _scratch(path)
    try:
        with open(scratch, "wb") as file:
            # Not `np.savez`, whose own argument `file` no array may be called.
            with zipfile.ZipFile(file, "w", allowZip64=True) as archive:
                for name, array in {"head": _to_bytes(head), **arrays}.items():
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array(member, array, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
        _sync_directory(path.parent)
    except OSError:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)
        raise
    return digest


def load(path: Path) -> tuple[dict[str, Any], Any, str]:
    """What :func:`save` wrote: meta, tree and digest."""
    try:
        with open(path, "rb") as file:
            members = np.load(file, allow_pickle=False)
            if not isinstance(members, np.lib.npyio.NpzFile):
                raise ValueError("not an archive")
            arrays = {name: members[name] for name in members.files}
        head = json.loads(arrays.pop("head").tobytes())
        if head["format"] != _FORMAT:
            raise ValueError("another format")
        newer = head["version"] > _VERSION
    except Exception as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the file could not be read at all
        # A damaged archive makes NumPy raise nearly anything.
        raise ValueError(
            f"'{path}' is damaged or no checkpoint of numpyro_mhbt ({error}). It was "
            "left as it is. Choose another path, or move it away to start anew."
        ) from error
    if newer:
        raise ValueError(
            f"'{path}' was written by a newer version of numpyro_mhbt (its format is "
            f"{head['version']}, this one reads up to {_VERSION}). It was left as it "
            "is. Upgrade the package, or choose another path."
        )
    digest = _digest({"meta": head["meta"], "tree": head["tree"]}, arrays)
    if digest != head["digest"]:
        raise ValueError(
            f"'{path}' is damaged: its content does not match its checksum. It was "
            "left as it is. Choose another path, or move it away to start anew."
        )
    return head["meta"], _Tree(head["tree"], arrays), digest


@dataclasses.dataclass(frozen=True)
class _Tree:
    """A tree that was read and not yet built, for its types may be unknown."""

    code: Any
    arrays: dict[str, np.ndarray]

    def build(self) -> Any:
        return _decode(self.code, self.arrays)


def is_scratch(path: Path) -> bool:
    """Whether a file is what a killed process left of a write, or the lock."""
    return path.name == _LOCK or (
        path.name.startswith(".") and path.name.endswith(_PART)
    )


def _scratch(path: Path) -> Path:
    return path.with_name(f".{path.name}{_PART}")


def _sync_directory(path: Path) -> None:
    """So that a file's new name, too, outlives a loss of power."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keep other processes away. The system unlocks when this one ends, or is ended."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield
        return
    with open(directory / _LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RuntimeError(
                f"Another run writes to '{directory}' at this moment. Wait until it "
                "ends, or choose another path."
            ) from None
        yield


def _encode(tree: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """
    A tree as JSON, with its arrays put aside by name.

    Static parts, which JAX keeps in the structure of a tree, are included.
    """

    def inner(key: Any, value: Any) -> Any:
        return _encode(value, f"{name}/{key}" if name else str(key), arrays)

    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, jax.Array | np.ndarray | np.generic):
        return _encode_array(tree, name or "array", arrays)
    if isinstance(tree, dict):
        return {"dict": [[key, inner(key, value)] for key, value in tree.items()]}
    if fields := _fields(type(tree)):
        kind = f"{type(tree).__module__}:{type(tree).__qualname__}"
        return {"type": kind, "fields": {k: inner(k, getattr(tree, k)) for k in fields}}
    if type(tree) in (tuple, list):
        items = [inner(key, value) for key, value in enumerate(tree)]
        return {type(tree).__name__: items}
    raise TypeError(f"A checkpoint cannot hold {name or 'a'} {type(tree)}.")


def _encode_array(array: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    while name in arrays or name == "head":  # names of sites may have slashes
        name += "_"
    code = {"array": name}
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        code["key"] = str(random.key_impl(array))
        array = random.key_data(array)
    array = np.asarray(array)
    if array.dtype.kind == "V":  # bfloat16 and others that NumPy does not know
        code["dtype"] = array.dtype.name
        array = array.view(f"u{array.dtype.itemsize}")
    arrays[name] = array
    return code


def _decode(code: Any, arrays: dict[str, np.ndarray]) -> Any:
    if not isinstance(code, dict):
        return code
    if "array" in code:
        array = arrays[code["array"]]
        if "dtype" in code:
            array = array.view(jnp.dtype(code["dtype"]))
        if "key" in code:
            return random.wrap_key_data(jnp.asarray(array), impl=code["key"])
        return array
    if "dict" in code:
        return {key: _decode(value, arrays) for key, value in code["dict"]}
    if "type" in code:
        fields = {k: _decode(v, arrays) for k, v in code["fields"].items()}
        return _find_type(code["type"])(**fields)
    if "tuple" in code:
        return tuple(_decode(value, arrays) for value in code["tuple"])
    return [_decode(value, arrays) for value in code["list"]]


def _fields(kind: type) -> tuple[str, ...]:
    """Of a named tuple or dataclass."""
    if dataclasses.is_dataclass(kind):
        return tuple(field.name for field in dataclasses.fields(kind))
    return getattr(kind, "_fields", ()) if issubclass(kind, tuple) else ()


def _find_type(name: str) -> type:
    """A named tuple or dataclass of ours: no file makes anything else be called."""
    module, _, rest = name.partition(":")
    if module.split(".")[0] in _OURS:
        kind = getattr(importlib.import_module(module), rest, None)
        if isinstance(kind, type) and _fields(kind):
            return kind
    raise ValueError(f"A checkpoint asks for the unknown type {name!r}.")


def _to_bytes(head: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(json.dumps(head).encode(), np.uint8)


def _digest(head: dict[str, Any], arrays: dict[str, np.ndarray]) -> str:
    code = hashlib.sha256(json.dumps(head).encode())
    for name, array in arrays.items():
        code.update(f"{name} {array.dtype.str} {array.shape}".encode())
        code.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return code.hexdigest()
