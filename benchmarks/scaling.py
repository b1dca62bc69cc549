"""
What a step costs with rows spread over devices: a cost model, checked and extended.

Logistic regression with a control variate of order 0. A step on k devices takes

    w (p0 + p1 m/k + p2 d m/k + p3 d) + all-reduce(k, d),

w being how often each core has to work in turn (forced host devices share the cores of
one machine), and the all-reduce a0 log2 k + a1 d between devices of a process and
b0 + b1 d between two processes on loopback. The constants are fitted to measured times,
all but those of one m and d, which the fit has not seen. On a cluster w is 1, and the
all-reduce between h hosts takes

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

ROWS, STEPS, REPEATS = 2**16, 100, 7
SHAPES = [(2048, 16), (32768, 16), (8192, 64), (2048, 256), (8192, 256)]
HELD_OUT = (8192, 64)
DEVICES = [1, 2, 4, 8]


def work(devices: int, coordinator: str | None, process: int) -> None:
    """Print the time of a step for each of the shapes, in this process."""
    flag = f"--xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = flag
    import jax

    processes = 1
    if coordinator:
        processes = 2
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
    for m, dim in SHAPES:

        def model(x: jax.Array, y: jax.Array, m: int = m, dim: int = dim) -> None:
            w = numpyro.sample("w", dist.Normal(0, 1).expand([dim]).to_event(1))
            with numpyro.plate("N", len(x), subsample_size=m):
                xb = numpyro.subsample(x, event_dim=1)
                yb = numpyro.subsample(y, event_dim=0)
                numpyro.sample("y", dist.Bernoulli(logits=xb @ w), obs=yb)

        generator = np.random.default_rng(process)
        x = generator.normal(size=(ROWS // processes, dim)).astype(np.float32)
        y = (generator.random(len(x)) < 0.5).astype(np.float32)
        data = [jax.make_array_from_process_local_data(sharding, a) for a in (x, y)]
        reference = Taylor(order=0, ref_params={"w": jnp.zeros(dim)})
        kernel = MHBT(model, c_n=math.sqrt(m), control_variate=reference)
        start = {"w": jnp.zeros(dim)}
        state = kernel.init(random.key(0), 0, start, tuple(data), {})

        def steps(state: object, *data: jax.Array, kernel: MHBT = kernel) -> object:
            def one(state: object, _: None) -> tuple:
                return kernel.sample(state, data, {}), None

            return lax.scan(one, state, None, STEPS)[0]

        run = jax.jit(steps)
        state = jax.block_until_ready(run(state, *data))
        times = []
        for _ in range(REPEATS):
            begin = time.perf_counter()
            state = jax.block_until_ready(run(state, *data))
            times.append((time.perf_counter() - begin) / STEPS)
        if process == 0:
            point = {"devices": devices, "processes": processes, "m": m, "d": dim}
            print(json.dumps(point | {"seconds": float(np.median(times))}), flush=True)


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


def features(point: dict, cores: int) -> np.ndarray:
    """What each constant of the model is multiplied by."""
    k, m, d = point["devices"] * point["processes"], point["m"], point["d"]
    turns = k / min(k, cores)
    own = turns * np.array([1, m / k, d * m / k, d])
    between = np.zeros(4)
    if point["processes"] > 1:
        between[2:] = 1, d
    elif k > 1:
        between[:2] = math.log2(k), d
    return np.concatenate([own, between])


def fit(points: list[dict], cores: int) -> np.ndarray:
    """Constants, none negative, that make relative errors small."""
    from scipy.optimize import nnls

    seconds = np.array([point["seconds"] for point in points])
    rows = np.stack([features(point, cores) for point in points])
    return nnls(rows / seconds[:, None], np.ones(len(points)))[0]


def predict(
    constants: np.ndarray,
    m: float,
    d: int,
    hosts: int,
    latency: float,
    bandwidth: float,
) -> tuple[float, float]:
    """Seconds of a step on each of ``hosts``, and of these the all-reduce's."""
    own = constants[:4] @ np.array([1, m / hosts, d * m / hosts, d])
    network = latency * math.log2(hosts)
    network += 2 * (1 - 1 / hosts) * 4 * (d + 3) / bandwidth
    return own + network, network


def report(points: list[dict], args: argparse.Namespace) -> None:
    seen = [p for p in points if (p["m"], p["d"]) != HELD_OUT]
    constants = fit(seen, args.cores)
    print("\n| devices | processes | m | d | measured ms | model ms | error | fitted |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    errors: dict[bool, list[float]] = {True: [], False: []}
    for p in points:
        model, fitted = features(p, args.cores) @ constants, p in seen
        errors[fitted].append(model / p["seconds"] - 1)
        print(
            f"| {p['devices']} | {p['processes']} | {p['m']} | {p['d']} "
            f"| {1e3 * p['seconds']:.3f} | {1e3 * model:.3f} "
            f"| {errors[fitted][-1]:+.0%} | {'yes' if fitted else 'no'} |"
        )
    for fitted, name in (True, "fitted"), (False, "held out"):
        size = np.abs(errors[fitted])
        print(f"\n{name}: relative error {size.mean():.0%}, at most {size.max():.0%}")
    print(f"\nall-reduce between two processes: {1e3 * constants[6]:.2f} ms and more")
    n, d = args.rows, args.dim
    print(
        f"\nn = {n:.0e}, d = {d}, {1e6 * args.latency:.0f} us and "
        f"{args.bandwidth / 1e9:.2f} GB/s:\n"
    )
    print(
        "| hosts | GB per host | m | ms a step | all-reduce ms | bytes sent | if rows |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for m in args.batch:
        for hosts in args.hosts:
            total, network = predict(
                constants, m, d, hosts, args.latency, args.bandwidth
            )
            print(
                f"| {hosts} | {4 * n * (d + 1) / hosts / 1e9:.1f} | {m} "
                f"| {1e3 * total:.3f} | {1e3 * network:.3f} | {4 * (d + 3)} "
                f"| {4 * m * (d + 1) // hosts} |"
            )
    picture(points, seen, constants, args)


def picture(
    points: list[dict],
    seen: list[dict],
    constants: np.ndarray,
    args: argparse.Namespace,
) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    for fitted, style, name in (True, "o", "fitted"), (False, "s", "held out"):
        some = [p for p in points if (p in seen) == fitted]
        measured = [1e3 * p["seconds"] for p in some]
        model = [1e3 * features(p, args.cores) @ constants for p in some]
        left.loglog(measured, model, style, label=name, alpha=0.8)
    ends = np.array(
        [min(p["seconds"] for p in points), max(p["seconds"] for p in points)]
    )
    left.loglog(1e3 * ends, 1e3 * ends, color="grey", lw=1, zorder=0)
    left.set(xlabel="measured, ms a step", ylabel="cost model, ms a step")
    left.set_title(f"{args.cores} cores: 1 to 8 devices, 2 processes")
    left.xaxis.set_minor_formatter("")
    left.yaxis.set_minor_formatter("")
    left.legend(frameon=False)
    hosts = 2 ** np.arange(8)
    for m in args.batch:
        times = [
            1e3 * predict(constants, m, args.dim, h, args.latency, args.bandwidth)[0]
            for h in hosts
        ]
        right.loglog(hosts, times, "o-", label=f"m = {m}")
    floor = [args.latency * 1e3 * math.log2(h) for h in hosts[1:]]
    right.loglog(hosts[1:], floor, color="grey", ls="--", label="the network alone")
    right.set(xlabel="hosts", ylabel="predicted, ms a step")
    right.set_xticks(hosts, [str(h) for h in hosts])
    right.set_title(f"d = {args.dim}, any number of rows")
    right.legend(frameon=False)
    figure.savefig(args.out, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.strip().split("\n")[0])
    parser.add_argument("--measure", type=Path, help="where to keep measured times")
    parser.add_argument("--times", type=Path, help="that were measured before")
    parser.add_argument("--cores", type=int, default=os.cpu_count())
    parser.add_argument("--rows", type=float, default=1e9)
    parser.add_argument("--dim", type=int, default=64)
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
