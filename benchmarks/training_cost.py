"""
What an epoch of MHBT as a trainer costs, as a ratio to one of optax's SGD.

The network of ``examples/mnist.py`` (477010 weights, batches of 100, the same batches
for both), in the paper's settings: after a rejected move the next step only looks at
the current point on its batch, and once an epoch forward moves are tried for the sake
of beta. Alternating, after some epochs so that moves are accepted as often as in
training; the median of ratios counts.

    python benchmarks/training_cost.py --data mnist.npz
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
import sys
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import optax

sys.path.append(str(Path(__file__).parents[1] / "examples"))
import datasets
from mnist import ROWS, SCALE, Network
from training import Task, first_weights, start_mhbt, start_optax


def measure(
    data: Path | None, rate: float = 0.1, before: int = 3, repeats: int = 9
) -> dict[str, float]:
    """
    :param before: epochs that are not counted.
    """
    x, y, *test = map(jnp.asarray, datasets.mnist(data))
    task = Task(Network(), (x[:ROWS], y[:ROWS]), test, SCALE, SCALE, "softmax", 100)
    weights = first_weights(random.key(0), task)
    runs: dict[str, tuple[Callable, object]] = {
        "SGD": start_optax(task, weights, 0, optimizer=optax.sgd(rate)),
        "MHBT": start_mhbt(task, weights, 0, rate=rate, c_n=100.0),
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    accepted = []
    for _ in range(before + repeats):
        for name, (epoch, state) in runs.items():
            begin = time.perf_counter()
            state, figures = jax.block_until_ready(epoch(state, task.train))
            seconds[name].append(time.perf_counter() - begin)
            runs[name] = epoch, state
            if figures is not None:
                accepted.append(float(figures[0][figures[1] >= 0].mean()))
    times = np.array(list(seconds.values()))[:, before:]
    return {
        "SGD step, ms": float(1e3 * np.median(times[0]) / (ROWS // 100)),
        "MHBT / SGD": float(np.median(times[1] / times[0])),
        "acceptance of moves": float(np.mean(accepted[before:])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--data", type=Path, help=".npz; without it, downloaded")
    parser.add_argument("--rate", type=float, default=0.1)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    for name, value in measure(args.data, args.rate, repeats=args.repeats).items():
        print(f"{name}: {value:.2f}")


if __name__ == "__main__":
    main()
