"""
What a step costs with rows spread over devices: a cost model, checked and extended.

Logistic regression with d coefficients and a control variate of order 0, on devices of
one core each. A step on k of them, each with m/k of the m rows of a batch, takes

    w t(m/k) + all-reduce(k),

t(m) being the time of a step on one device, and w = k/cores, or 1 with cores enough.
For t, times measured at a few m on one device are joined by lines, for each d; the last
line goes on beyond. The all-reduce takes a log2 k between devices of a process, and b
between two processes on loopback: what two take longer than t(m/2) at the smallest m.
All other times, of other m and of more devices, only check the model.

On a cluster w is 1, and the all-reduce between h hosts takes

    latency log2 h + 2 (1 - 1/h) 4 (d + 3) / bandwidth

with constants of the network that are given, not measured.

    python benchmarks/scaling.py --measure times.json   # some minutes, alone
    python benchmarks/scaling.py --times times.json     # table and picture
"""

from __future__ import annotations

import argparse
import json
import math
import os
from pathlib import Path
import socket
import subprocess
import sys
import time

import numpy as np

ROWS, REPEATS = 10**6, 15
DIMS = [16, 64]
KNOTS = [2**8, 2**11, 2**14, 2**17]  # of t; the rest of ALONE checks it
ALONE = sorted([*KNOTS, 2**10, 2**13, 2**16, 2**18])
SHARED = [2**11, 2**13, 2**15]  # the first of them for the all-reduce
CALIBRATE = "t", "all-reduce"
DEVICES = [1, 2, 4, 8]


def work(devices: int, coordinator: str | None, process: int) -> None:
    """Print the time of a step for each batch size and width, in this process."""
    flags = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count="
    os.environ["XLA_FLAGS"] = f"{flags}{devices}"
    processes = 2 if coordinator else 1
    if devices * processes == 1:
        os.sched_setaffinity(0, {0})  # or it would use more cores than its share
    import jax

    if coordinator:
        jax.config.update("jax_platforms", "cpu")
        jax.distributed.initialize(coordinator, processes, process)
    from jax import lax, random
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    import numpyro
    import numpyro.distributions as dist

    from numpyro_mhbt import MHBT, Taylor

    mesh = Mesh(np.array(jax.devices()), ("data",))
    sharding = NamedSharding(mesh, PartitionSpec("data"))

    def start(m: int, *data: jax.Array) -> tuple:
        """A program for some steps with batches of m rows, how many, and a state."""
        dim, steps = data[0].shape[1], min(max(2**20 // m, 10), 100)

        def model(x: jax.Array, y: jax.Array) -> None:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([dim]).to_event(1))
            with numpyro.plate("N", len(x), subsample_size=m):
                xb = numpyro.subsample(x, event_dim=1)
                yb = numpyro.subsample(y, event_dim=0)
                numpyro.sample("y", dist.Bernoulli(logits=xb @ w), obs=yb)

        zeros = {"w": jnp.zeros(dim)}
        reference = Taylor(order=0, ref_params=zeros)
        kernel = MHBT(model, c_n=math.sqrt(m), control_variate=reference)

        def run(state: object, *data: jax.Array) -> object:
            def one(state: object, _: None) -> tuple:
                return kernel.sample(state, data, {}), None

            return lax.scan(one, state, None, steps)[0]

        return jax.jit(run), steps, kernel.init(random.key(0), 0, zeros, data, {})

    for dim in DIMS:
        generator = np.random.default_rng(process)
        x = generator.standard_normal((ROWS // processes, dim), dtype=np.float32)
        y = (generator.random(len(x)) < 0.5).astype(np.float32)
        data = [jax.make_array_from_process_local_data(sharding, a) for a in (x, y)]
        sizes = ALONE if devices * processes == 1 else SHARED
        runs = {m: start(m, *data) for m in sizes}
        states, times = {m: runs[m][2] for m in sizes}, {m: [] for m in sizes}
        for _ in range(1 + REPEATS):  # in turn, so that all see the same disturbances
            for m, (run, steps, _) in runs.items():
                begin = time.perf_counter()
                states[m] = jax.block_until_ready(run(states[m], *data))
                times[m].append((time.perf_counter() - begin) / steps)
        for m in sizes if process == 0 else []:
            point = {"devices": devices, "processes": processes, "m": m, "d": dim}
            seconds = float(np.median(times[m][1:]))  # the first compiles
            print(json.dumps(point | {"seconds": seconds}), flush=True)


def measure() -> list[dict]:
    points = []
    for devices in DEVICES:
        points += _launch([["--devices", str(devices)]])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    pair = ["--devices", "1", "--coordinator", address, "--process"]
    points += _launch([[*pair, "0"], [*pair, "1"]])
    return points


def _launch(options: list[list[str]]) -> list[dict]:
    command = [sys.executable, __file__, "--work"]
    started = [
        subprocess.Popen([*command, *own], stdout=subprocess.PIPE, text=True)
        for own in options
    ]
    said = [process.communicate(timeout=600)[0] for process in started]
    found = [json.loads(x) for x in said[0].splitlines() if x.startswith("{")]
    for point in found:
        print(point, flush=True)
    return found


class Model:
    """Of the time of a step, from the points that calibrate it."""

    def __init__(self, points: list[dict], cores: int) -> None:
        self.cores, self.reduce = cores, {1: 0.0, 2: 0.0}  # for so many processes
        self.points = [p for p in points if role(p) == "t"]
        for n in self.reduce:
            two = [p for p in points if role(p) == "all-reduce" and p["processes"] == n]
            self.reduce[n] = np.mean([p["seconds"] - self(p) for p in two])

    def alone(self, m: float, d: int) -> float:
        """t(m) of one device with rows of width d."""
        known = sorted((p["m"], p["seconds"]) for p in self.points if p["d"] == d)
        i = min(max(sum(size < m for size, _ in known), 1), len(known) - 1)
        (m0, t0), (m1, t1) = known[i - 1 : i + 1]
        return t0 + (t1 - t0) * (m - m0) / (m1 - m0)

    def __call__(self, p: dict) -> float:
        k = p["devices"] * p["processes"]
        own = k / min(k, self.cores) * self.alone(p["m"] / k, p["d"])
        return own + self.reduce[p["processes"]] * math.log2(k)


def role(p: dict) -> str:
    """What a point is for: to calibrate the model, or to check it, and how."""
    k = p["devices"] * p["processes"]
    if k == 1:
        return "t" if p["m"] in KNOTS else "other m, one device"
    if k > 2:
        return f"any m, {k} devices"
    if p["m"] == SHARED[0]:
        return "all-reduce"
    return "other m, two " + ("devices" if p["processes"] == 1 else "processes")


def predict(model: Model, m: float, hosts: int, args: argparse.Namespace) -> tuple:
    """Seconds of a step on each of ``hosts``, and of these the all-reduce's."""
    network = args.latency * math.log2(hosts)
    network += 2 * (1 - 1 / hosts) * 4 * (args.dim + 3) / args.bandwidth
    return model.alone(m / hosts, args.dim) + network, network


def report(points: list[dict], args: argparse.Namespace) -> None:
    model, errors = Model(points, args.cores), {}
    row("devices", "processes", "m", "d", "measured ms", "model ms", "error", "for")
    for p in points:
        *shape, seconds = p.values()
        error = model(p) / seconds - 1
        errors.setdefault(role(p), []).append(error)
        row(*shape, 1e3 * seconds, 1e3 * model(p), f"{error:+.0%}", role(p))
    held_out = [e for name in errors if name not in CALIBRATE for e in errors[name]]
    print()
    row("points", "number", "mean size of error", "largest")
    for name, some in (errors | {"all held out": held_out}).items():
        size = np.abs(some)
        row(name, len(some), f"{size.mean():.0%}", f"{size.max():.0%}")
    print(f"\nall-reduce of two devices: {1e3 * model.reduce[1]:.3f} ms")
    print(f"all-reduce of two processes: {1e3 * model.reduce[2]:.3f} ms")
    n, d = args.rows, args.dim
    network = f"{1e6 * args.latency:.0f} us and {args.bandwidth / 1e9:.2f} GB/s"
    print(f"\nn = {n:.0e}, d = {d}, {network}:\n")
    row("hosts", "GB each", "m", "ms a step", "all-reduce ms", "bytes sent", "if rows")
    for m in args.batch:
        for hosts in args.hosts:
            times = [1e3 * x for x in predict(model, m, hosts, args)]
            sent = 4 * (d + 3), 4 * m * (d + 1) // hosts
            row(hosts, 4e-9 * n * (d + 1) / hosts, m, *times, *sent)
    picture(points, model, args)


def row(*cells: object) -> None:
    cells = [f"{x:.3f}" if isinstance(x, float) else x for x in cells]
    print("|", " | ".join(map(str, cells)), "|")


def picture(points: list[dict], model: Model, args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for name, marker in zip(dict.fromkeys(map(role, points)), "oxdsv^P", strict=True):
        some = [p for p in points if role(p) == name]
        errors = [100 * (model(p) / p["seconds"] - 1) for p in some]
        label = f"calibrates {name}" if name in CALIBRATE else name
        (dots,) = left.plot([1e3 * p["seconds"] for p in some], errors, marker)
        dots.set(label=label, **({"color": "grey"} if name in CALIBRATE else {}))
    left.axhspan(-20, 20, color="grey", alpha=0.12, lw=0, label="within 20%")
    left.set(xscale="log", xlabel="measured, ms a step", ylabel="error of the model, %")
    left.set_title(f"1 to 8 devices and 2 processes on {args.cores} cores")
    left.legend(frameon=False, fontsize=8)
    hosts = 2 ** np.arange(8)
    for m in args.batch:
        times = [1e3 * predict(model, m, h, args)[0] for h in hosts]
        right.loglog(hosts, times, "o-", label=f"m = {m}")
    network = [1e3 * predict(model, args.batch[0], h, args)[1] for h in hosts[1:]]
    right.loglog(hosts[1:], network, color="grey", ls="--", label="all-reduce alone")
    right.set(xlabel="hosts", ylabel="predicted, ms a step")
    right.set_xticks(hosts, [str(h) for h in hosts])
    right.set_title(f"Predicted: d = {args.dim}, any number of rows")
    right.legend(frameon=False)
    figure.savefig(args.out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--measure", type=Path, help="where to keep measured times")
    parser.add_argument("--times", type=Path, help="that were measured before")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=float, default=1e9)
    parser.add_argument("--dim", type=int, choices=DIMS, default=64)
    parser.add_argument("--batch", type=int, nargs="+", default=[2**12, 2**16, 2**20])
    parser.add_argument("--hosts", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--latency", type=float, default=25e-6, help="s per hop")
    parser.add_argument("--bandwidth", type=float, default=1.25e9, help="bytes per s")
    parser.add_argument("--out", default="scaling.png")
    parser.add_argument("--work", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--coordinator", help=argparse.SUPPRESS)
    parser.add_argument("--process", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        work(args.devices, args.coordinator, args.process)
        return
    if args.measure:
        points = measure()
        args.measure.write_text(json.dumps(points))
    elif args.times:
        points = json.loads(args.times.read_text())
    else:
        parser.error("one of --measure and --times")
    report(points, args)


if __name__ == "__main__":
    main()
