"""
What a step costs with rows on disk, as a ratio to the same step with rows in memory.

Logistic regression, d = 20, m = 1000, n = 10^6, two files that the system has in its
page cache. All run in compiled loops, alternating, and the median of the ratios counts.

    python benchmarks/disk.py

With ``--slow`` each read also sleeps for as long as told, as a disk would: what of it
the next batch's early reading hides behind the computation.

    python benchmarks/disk.py --slow 0.2    # milliseconds

With ``--cold`` there is one file of that size, which the system must forget before
each run, so that rows come from the disk itself. A run is too short to meet many pages
twice. A light step has nothing to hide a read behind, a heavy one has.

    python benchmarks/disk.py --cold 6    # GB, in the folder for temporary files

Reading costs processor time, too. With ``--one-core`` the computation keeps to one
core, and leaves the others to it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
import ctypes
from functools import partial
import mmap
import os
from pathlib import Path
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from step_cost import BATCH, DIM, STEPS, kernel_loop, loop_of, make_data, seconds

from numpyro_mhbt import MHBT, RSGLD, DiskRows, Taylor

CONTROLS = {
    "no control variate": None,
    "order 0": Taylor(order=0),
    "order 2": Taylor(order=2),
}


class Slow:
    """An array whose rows take their time."""

    def __init__(self, array: np.ndarray, delay: float) -> None:
        self.shape, self.dtype = array.shape, array.dtype
        self._array, self._delay = array, delay

    def __getitem__(self, rows: Any) -> np.ndarray:
        time.sleep(self._delay)
        return self._array[rows]


COLD_STEPS = 100
WORK = {"light": 0, "medium": 4, "heavy": 16}


def laborious(work: int) -> Callable[[Any], None]:
    """Logistic regression, with products of large matrices that cost time each step."""
    size = 512
    matrix = np.random.default_rng(0).normal(size=(size, size)) / size**0.5
    matrix = jnp.asarray(matrix, jnp.float32)

    def model(table: Any) -> None:
        w = numpyro.sample("w", dist.Normal(0, 1).expand([DIM]).to_event(1))
        product = matrix * w[0]
        for _ in range(work):
            product = jnp.tanh(product @ matrix)
        # Outside of the plate, so that the kernel's first look at all rows is quick.
        numpyro.factor("work", 1e-6 * jnp.sum(product))
        with numpyro.plate("N", len(table), subsample_size=BATCH) as idx:
            rows = table[idx]
            x, y = rows[:, :DIM], rows[:, DIM]
            numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=y)

    return model


def compute_on_one_core() -> None:
    """To be called before JAX starts its threads, as many as it sees cores."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    jax.block_until_ready(jnp.ones(1))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def write_table(path: Path, gigabytes: float) -> None:
    """Rows of ``DIM`` covariates and an outcome."""
    n = int(gigabytes * 1e9 / (4 * (DIM + 1)))
    table = np.lib.format.open_memmap(path, "w+", np.float32, (n, DIM + 1))
    rng = np.random.default_rng(0)
    for begin in range(0, n, 10**6):
        part = rng.standard_normal((min(10**6, n - begin), DIM + 1), np.float32)
        part[:, DIM] = part[:, DIM] > 0
        table[begin : begin + len(part)] = part
    table.flush()


def forget(path: Path, files: list[DiskRows]) -> None:
    """Take the file out of the system's cache, and see that it is out."""
    for file in files:
        # The system keeps pages that a process has mapped.
        file._source._map.madvise(mmap.MADV_DONTNEED)  # type: ignore[attr-defined]
    with open(path, "rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    share = cached(path)
    assert share < 0.01, f"{share:.0%} of the file are still in the cache"


def cached(path: Path) -> float:
    """The share of a file's pages that are in memory."""
    whole = np.memmap(path, np.uint8, "r")
    pages = np.zeros(-(-whole.size // mmap.PAGESIZE), np.uint8)
    mincore = ctypes.CDLL(None).mincore
    mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    assert mincore(whole.ctypes.data, whole.size, pages.ctypes.data) == 0
    return float(np.mean(pages & 1))


def read_alone(file: DiskRows) -> float:
    """Seconds for the rows of as many batches as a run has."""
    batches = np.random.default_rng(1).integers(0, len(file), (COLD_STEPS, BATCH))
    begin = time.perf_counter()
    for rows in batches:
        file.read(rows)
    return time.perf_counter() - begin


def cold(gigabytes: float, repeats: int) -> None:
    print("| ms per step | in memory | reading alone | no prefetch | prefetch |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.npy")
        write_table(path, gigabytes)
        files = [DiskRows(path, prefetch=ahead) for ahead in (False, True)]
        in_memory = jnp.asarray(files[0][: 10**6])
        for name, work in WORK.items():
            # With temperature and steps given, the file is read but once beforehand.
            kernel = MHBT(
                laborious(work),
                RSGLD(1e-3),
                c_n=10.0,
                control_variate=None,
                adapt_step_size=False,
                adapt_mass_matrix=False,
            )
            loops = [loop_of(kernel, (x,), COLD_STEPS) for x in (in_memory, files[0])]
            # The same rows, so that they need not be seen again.
            run, (state, _) = loops[1]
            loops.append((run, (state, (files[1],))))
            runs = [partial(seconds, each) for each in loops]
            for run in runs:
                run()  # compile
            runs.insert(1, partial(read_alone, files[0]))
            times = []
            for _ in range(repeats):
                for run in runs:
                    forget(path, files)
                    times.append(run() / COLD_STEPS * 1e3)
            medians = np.median(np.reshape(times, (repeats, -1)), axis=0)
            print(f"| {name} | {' | '.join(f'{x:.1f}' for x in medians)} |", flush=True)
        print(f"{cached(path):.0%} of the file were read in the last run.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--slow", type=float, default=0.0, help="ms per batch")
    parser.add_argument("--cold", type=float, help="GB of a file out of the cache")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--one-core", action="store_true", help="for the computation")
    args = parser.parse_args()
    if args.one_core:
        compute_on_one_core()
    if args.cold:
        cold(args.cold, args.repeats)
        return
    arrays = make_data(args.rows)
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{name}.npy") for name in "xy"]
        for path, array in zip(paths, arrays, strict=True):
            np.save(path, array)
        x, y = (np.load(path, mmap_mode="r") for path in paths)
        source = Slow(x, args.slow / 1000) if args.slow else x
        print("| | in memory, µs | on disk | without prefetch |")
        print("| --- | --- | --- | --- |")
        for name, control in CONTROLS.items():
            loop = partial(kernel_loop, proposal=RSGLD(), control=control)
            loops = [loop(arrays)] + [
                loop((DiskRows(source, prefetch=ahead), DiskRows(y, prefetch=ahead)))
                for ahead in (True, False)
            ]
            for each in loops:
                seconds(each)  # compile, and read the files once
            times = np.array(
                [[seconds(each) for each in loops] for _ in range(args.repeats)]
            )
            ahead, alone = np.median(times[:, 1:] / times[:, :1], axis=0)
            step = np.median(times[:, 0]) / STEPS * 1e6
            print(f"| {name} | {step:.0f} | {ahead:.2f} | {alone:.2f} |", flush=True)


if __name__ == "__main__":
    main()
