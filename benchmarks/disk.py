"""
What a step costs with rows on disk, as a ratio to the same step with rows in memory.

Logistic regression, d = 20, m = 1000, n = 10^6, two files that the system has in its
page cache. All run in compiled loops, alternating, and the median of the ratios counts.

    python benchmarks/disk.py

With ``--slow`` each read also sleeps for as long as told, as a disk would: what of it
the next batch's early reading hides behind the computation.

    python benchmarks/disk.py --slow 0.2    # milliseconds
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
import tempfile
import time
from typing import Any

import numpy as np
from step_cost import STEPS, kernel_loop, make_data, seconds

from numpyro_mhbt import RSGLD, DiskRows, Taylor

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--slow", type=float, default=0.0, help="ms per batch")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
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
