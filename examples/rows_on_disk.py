"""
Rows on disk: logistic regression on a file that does not fit into memory.

Makes a file of rows, unless it is there already, and samples the posterior with a
control variate of order 2, for which it passes over all rows a few times. Then a step
reads 1000 rows. The process may not hold more memory than told; the file is mapped,
which counts no more than the system's own cache of files does.

    python examples/rows_on_disk.py
    python examples/rows_on_disk.py --gigabytes 20 --memory-limit 4
"""

from __future__ import annotations

import argparse
from pathlib import Path
import resource
import threading
import time

import jax
from jax import random
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_mhbt import MHBT, DiskRows, Taylor, batch_report

DIM, AT_ONCE = 49, 200_000
TRUTH = np.linspace(-0.5, 0.5, DIM)


def model(rows: DiskRows, batch_size: int = 1000) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([rows.shape[1] - 1]).to_event(1))
    with numpyro.plate("N", len(rows), subsample_size=batch_size) as idx:
        batch = rows[idx]
        # Not by `logits`, whose derivative NumPyro has wrong where one is exactly 0: of
        # so many rows there is one, and the control variate's noise shows it.
        chance = jax.nn.sigmoid(batch[:, :-1] @ w)
        numpyro.sample("y", dist.Bernoulli(probs=chance), obs=batch[:, -1])


def make_file(path: Path, num_rows: int) -> None:
    """Rows of float64, the last column 0 or 1, written a part at a time."""
    shape = (num_rows, DIM + 1)
    file = np.lib.format.open_memmap(path, "w+", np.float64, shape)
    rng = np.random.default_rng(0)
    for start in range(0, num_rows, AT_ONCE):
        count = min(AT_ONCE, num_rows - start)
        part = np.empty((count, DIM + 1))
        rng.standard_normal(out=part)
        chance = 1 / (1 + np.exp(-part[:, :-1] @ TRUTH))
        part[:, -1] = rng.uniform(size=count) < chance
        file[start : start + count] = part
    file.flush()


class Watch(threading.Thread):
    """Looks at the memory of this process that is no file, and keeps the peak."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak = 0.0

    def run(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text().splitlines()
            (anonymous,) = (x for x in lines if x.startswith("RssAnon"))
            self.peak = max(self.peak, int(anonymous.split()[1]) / 2**20)
            time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--file", type=Path, default=Path("rows_on_disk.npy"))
    parser.add_argument("--gigabytes", type=float, default=0.5)
    parser.add_argument("--memory-limit", type=float, help="gigabytes")
    parser.add_argument("--num-samples", type=int, default=2000)
    parser.add_argument("--smoke", action="store_true", help="in seconds")
    parser.add_argument("--out", default="rows_on_disk", help="name of the picture")
    args = parser.parse_args()
    if args.smoke:
        args.gigabytes, args.num_samples = 0.02, 50
    if args.memory_limit:
        most = int(args.memory_limit * 1e9)
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
    watch = Watch()
    watch.start()
    if not args.file.exists():
        make_file(args.file, int(args.gigabytes * 1e9 / (8 * (DIM + 1))))
    rows = DiskRows(args.file)
    print(f"{args.file.stat().st_size / 1e9:.1f} GB, {rows}", flush=True)

    begin = time.perf_counter()
    kernel = MHBT(model, control_variate=Taylor(order=2))
    mcmc = MCMC(
        kernel,
        num_warmup=50 if args.smoke else 1000,
        num_samples=args.num_samples,
        progress_bar=False,
    )
    mcmc.run(random.key(0), rows)
    print(f"passes and draws: {time.perf_counter() - begin:.0f} s", flush=True)
    # `run` compiles each time, so the time of a step is taken without it.
    steps = jax.jit(
        lambda state: jax.lax.fori_loop(
            0, args.num_samples, lambda _, s: kernel.sample(s, (rows,), {}), state
        )
    )
    state = jax.block_until_ready(steps(mcmc.last_state))
    begin = time.perf_counter()
    jax.block_until_ready(steps(state))
    step = (time.perf_counter() - begin) / args.num_samples
    print(f"one step: {step * 1e6:.0f} µs")
    print(f"memory that is no file, at most: {watch.peak:.2f} GiB")
    print(batch_report(mcmc))

    draws = np.asarray(mcmc.get_samples()["w"], np.float64)
    mean, sd = draws.mean(0), draws.std(0)
    score = np.sqrt(np.mean(((mean - TRUTH) / sd) ** 2))
    print(f"distance of the means from the truth, in standard deviations: {score:.2f}")
    _, axes = plt.subplots(figsize=(6, 4))
    axes.axhline(0, color="0.8")
    axes.errorbar(TRUTH, mean - TRUTH, 2 * sd, fmt=".")
    axes.set(xlabel="coefficient of the made-up data", ylabel="posterior, less that")
    axes.set_title(f"{len(rows)} rows on disk, 1000 at a time")
    plt.savefig(f"{args.out}.png", dpi=120, bbox_inches="tight")


if __name__ == "__main__":
    main()
