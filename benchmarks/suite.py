"""
MHBT beside its peers, all of it: tables in Markdown and JSON, and pictures.

Systems are measured in turn in one run on the same data, several times over; the
median counts, and figures to compare are ratios within the run. Compilation is apart.
The error against the posterior of all rows stands beside each speed: a fast sampler of
something else is no sampler.

Needs BlackJAX: ``pip install -e ".[bench]"``. ``--data`` is the folder that
``models.py`` describes; without it real data are left out.

    python benchmarks/suite.py --data DIR          # everything, more than an hour
    python benchmarks/suite.py --quick             # a part of it, under five minutes
    python benchmarks/suite.py --targets           # what we aim at, 15 minutes
    python benchmarks/suite.py --only steps first-draw
    python benchmarks/suite.py --only speed --problems logistic-1e7 student
    python benchmarks/suite.py --tables            # anew, nothing measured
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
import json
import os
from pathlib import Path
import platform
import subprocess
import sys
import time
from typing import Any

import arviz as az
import jax
from jax import random
import jax.numpy as jnp
from models import (
    Problem,
    covtype_logistic,
    digits,
    hierarchical,
    logistic,
    student,
    truncated,
)
import numpy as np
import numpyro
from numpyro.infer import HMC, MCMC, NUTS, init_to_value
from pictures import MEAN_CLOSE, SD_CLOSE, Row, close, plot_growth, plot_speed
from reference import Reference, find_reference
from samplers import NUTS_SECONDS, Sampler, every_sampler, of_kernel
import step_cost

from numpyro_mhbt import MHBT, RSGLD, SGLD, RandomWalk, Taylor, full_data

HERE = Path(__file__).parent
sys.path.append(str(HERE.parent / "examples"))
ORDER = (
    "logistic",
    "student",
    "truncated",
    "hierarchical",
    "covtype_logistic",
    "digits",
)


# Effective samples per second, and errors


@dataclass
class Run:
    """A sampler on its way."""

    sampler: Sampler
    first_start: float
    """Seconds of set-up and warm-up with compilation."""
    start: float
    """And without."""
    state: Any
    draws: list[np.ndarray] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    speed: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, sampler: Sampler) -> Run:
        times = []
        for _ in range(2):
            begin = time.perf_counter()
            state = jax.block_until_ready(sampler.start())
            times.append(time.perf_counter() - begin)
        state = jax.block_until_ready(sampler.draw(state)[0])  # compiled now
        return cls(sampler, *times, state)

    def go_on(self, seconds: float) -> None:
        """Draw for so long, and note the effective samples per second."""
        parts, begin = [], time.perf_counter()
        while not parts or time.perf_counter() - begin < seconds or len(parts) < 2:
            self.state, z = jax.block_until_ready(self.sampler.draw(self.state))
            parts.append(np.asarray(z, np.float64))
        self.seconds.append(time.perf_counter() - begin)
        self.draws.append(np.concatenate(parts))
        self.speed.append(effective_draws(self.draws[-1]) / self.seconds[-1])

    def errors(self, exact: Reference) -> tuple[float, float]:
        """Of the means, in standard deviations, and of these: the largest."""
        z = (np.concatenate(self.draws) - exact.mean) / exact.sd
        return float(np.abs(z.mean(0)).max()), float(np.abs(z.std(0) - 1).max())

    def time_to_accuracy(self, exact: Reference) -> float:
        """Seconds, warm-up included, after which all moments stay close; or inf."""
        z = (np.concatenate(self.draws) - exact.mean) / exact.sd
        count = np.arange(1, len(z) + 1)[:, None]
        mean = np.cumsum(z, 0) / count
        sd = np.sqrt(np.maximum(np.cumsum(z**2, 0) / count - mean**2, 0))
        far = np.any((np.abs(mean) > MEAN_CLOSE) | (np.abs(sd - 1) > SD_CLOSE), 1)
        last = np.flatnonzero(far)
        needed = last[-1] + 1 if len(last) else 1
        if needed > 0.9 * len(z):
            return np.inf
        return self.start + sum(self.seconds) * needed / len(z)


def effective_draws(z: np.ndarray) -> float:
    """
    The smallest of bulk and tail effective sample size over the coordinates.

    The means alone would flatter samplers whose draws alternate around the mode: their
    mean is then known better than from independent draws, and their spread worse.
    """
    if not np.isfinite(z).all() or np.any(z.std(0) == 0):
        return 0.0
    found = az.convert_to_dataset({"z": z[None]})
    kinds = ("bulk", "tail")
    return min(float(az.ess(found, method=kind)["z"].min()) for kind in kinds)


def speed(problem: Problem, args: argparse.Namespace) -> list[Row]:
    """The best setting of each family, measured in turn."""
    exact = find_reference(problem)
    print(f"{problem.name}: k = {exact.pareto_k:.2f}, {exact.effective:.0f} draws")
    seconds = 0.5 if args.quick else 1.0
    best: dict[str, tuple[tuple[bool, float], Run]] = {}
    effort = 0 if args.quick else 3 if problem.n > 10**6 else 1 + (problem.n == 10**6)
    for sampler in every_sampler(problem, exact, effort):
        run = Run.begin(sampler)
        run.go_on(seconds)
        score = close(run.errors(exact)), run.speed[0]
        mean_error, sd_error = run.errors(exact)
        print(
            f"  {sampler.family}, {sampler.name}: {score[1]:.3g} per second, "
            f"errors {mean_error:.2f}, {sd_error:.2f}",
            flush=True,
        )
        if sampler.family not in best or score > best[sampler.family][0]:
            best[sampler.family] = score, run
        jax.clear_caches()  # else compiled programs exhaust the memory maps
    runs = [run for _, run in best.values()]
    for run in runs:
        run.state = jax.block_until_ready(run.sampler.draw(run.state)[0])
        run.draws, run.seconds, run.speed = [], [], []
    for _ in range(args.repeats):
        for run in runs:
            run.go_on(seconds)
    base = best["NUTS"][1].speed if "NUTS" in best else [0.0] * args.repeats
    of = {"problem": problem.name, "n": problem.n, "d": len(exact.mean)}
    rows = [of | row_of_speed(run, exact, base) for run in runs]
    if "NUTS" not in best:
        unknown = dict.fromkeys(rows[0], np.inf)
        setting = f"all rows: no draws in {NUTS_SECONDS} s"
        rows.append(
            unknown | of | {"sampler": "NUTS", "setting": setting, "ESS/s": 0.0}
        )
    jax.clear_caches()
    return rows


def row_of_speed(run: Run, exact: Reference, base: list[float]) -> Row:
    """:param base: the speed of NUTS in each turn."""
    mean_error, sd_error = run.errors(exact)
    ratios = [a / b if b > 0 else np.inf for a, b in zip(run.speed, base, strict=True)]
    return {
        "sampler": run.sampler.family,
        "setting": run.sampler.name,
        "ESS/s": float(np.median(run.speed)),
        "ratio to NUTS": float(np.median(ratios)),
        "mean error, sd": mean_error,
        "sd error": sd_error,
        "seconds to accuracy": run.time_to_accuracy(exact),
        "sampled, s": sum(run.seconds),
        "warm-up, s": run.start,
        "compilation, s": max(run.first_start - run.start, 0.0),
    }


def problems(args: argparse.Namespace) -> dict[str, Callable[[], Problem]]:
    if args.quick:
        return {"logistic": lambda: logistic(10**5)}
    if args.targets:
        return {"logistic": lambda: logistic(10**6)}
    found: dict[str, Callable[[], Problem]] = {
        "logistic-1e7": lambda: logistic(10**7),
        "logistic-1e6": lambda: logistic(10**6),
        "logistic-1e5": lambda: logistic(10**5),
        "logistic-1e4": lambda: logistic(10**4),
        "student": student,
        "truncated": truncated,
        "hierarchical": hierarchical,
    }
    if args.data:
        found["covtype"] = lambda: covtype_logistic(args.data)
        found["digits"] = lambda: digits(args.data)
    if wrong := set(args.problems or ()) - set(found):
        raise SystemExit(f"{wrong} is none of {', '.join(found)}")
    return {name: found[name] for name in args.problems or found}


def section_speed(args: argparse.Namespace) -> list[Row]:
    rows = []
    for make in problems(args).values():
        rows += speed(make(), args)
        publish(args, "speed", rows)  # so that a run cut short is not lost
    return rows


def section_settings(args: argparse.Namespace) -> list[Row]:
    """MHBT in all its settings, on one problem, each at the T that it chooses."""
    problem = logistic(10**5)
    exact = find_reference(problem)
    orders = {
        "none": None,
        **{str(order): Taylor(order=order) for order in (0, 1, 2)},
    }
    proposals = {"RSGLD": RSGLD(), "SGLD": SGLD(), "random walk": RandomWalk()}
    rows = []
    for order, control in orders.items():
        for name, proposal in proposals.items():
            kernel = MHBT(problem.model, proposal, control_variate=control)
            run = Run.begin(of_kernel(name, order, kernel, problem, 2000))
            for _ in range(args.repeats):
                run.go_on(0.2 if args.quick else 1.0)
            mean_error, _ = run.errors(exact)
            spread = np.concatenate(run.draws).std(0) / exact.sd
            rows.append(
                {
                    "order": order,
                    "proposal": name,
                    "T": float(run.state.temperature),
                    "acceptance": float(run.state.mean_accept_prob),
                    "ESS/s": float(np.median(run.speed)),
                    "mean error, sd": mean_error,
                    "sd / sd of the posterior": float(np.median(spread)),
                    "warm-up, s": run.start,
                    "compilation, s": max(run.first_start - run.start, 0.0),
                }
            )
            print(rows[-1], flush=True)
            jax.clear_caches()
    return rows


# Steps, rows and chains


def section_steps(args: argparse.Namespace) -> list[Row]:
    sizes = [10**5] if args.quick else [10**4, 10**5, 10**6, 10**7]
    rows = []
    kinds = [(n, False) for n in sizes]
    for n, wide in kinds if args.quick else [*kinds, (10**5, True)]:
        with jax.enable_x64(wide):
            bare, ratios = step_cost.measure(n, args.repeats)
        del ratios["bare"]
        kind = "float64" if wide else "float32"
        rows.append({"n": n, "type": kind, "bare step, µs": bare, **ratios})
        print(rows[-1], flush=True)
        jax.clear_caches()
    return rows


def section_chains(args: argparse.Namespace) -> list[Row]:
    """A draw of k vectorised chains; and bare gradients, of one batch or of k."""
    data = step_cost.make_data(10**5)
    steps = 200
    kernels = {
        "MHBT": MHBT(step_cost.model, c_n=20.0),
        "MHBT, shared batches": MHBT(step_cost.model, c_n=20.0, share_batches=True),
    }
    counts = (1, 16, 64) if args.quick else (1, 4, 16, 64, 256)
    loops: dict[tuple[str, int], tuple[Callable, tuple]] = {}
    for k in counts:
        for name, kernel in kernels.items():
            loops[name, k] = step_cost.loop_of(kernel, data, steps, k)
        for kind, own in (("gradient, own batch", True), ("one batch", False)):
            loops[kind, k] = step_cost.many_gradients(data, k, own, steps)
    for loop in loops.values():
        step_cost.seconds(loop)  # compile
    times = np.array(
        [
            [step_cost.seconds(loop) for loop in loops.values()]
            for _ in range(args.repeats)
        ]
    )
    place = {key: i for i, key in enumerate(loops)}
    rows = []
    for k in counts:
        row: Row = {"chains": k}
        for kind in (*kernels, "gradient, own batch", "one batch"):
            mine = times[:, place[kind, k]]
            row[f"{kind}, µs"] = float(np.median(mine)) / steps * 1e6
            row[f"{kind}, times one"] = float(
                np.median(mine / times[:, place[kind, 1]])
            )
        rows.append(row)
        print(row, flush=True)
    return rows


def section_loop(args: argparse.Namespace) -> list[Row]:
    """
    A step inside ``MCMC.run``, with and without a progress bar.

    NumPyro compiles its loop anew in each run, so a long run less a short one counts.
    """
    problem = logistic(10**5)
    short = 1000
    runs = {}
    for bar in (False, True):
        for k in (1, 10):
            kernel = MHBT(problem.model, c_n=20.0, steps_per_draw=k)
            mcmc = MCMC(
                kernel,
                num_warmup=100,
                num_samples=short,
                progress_bar=bar,
                jit_model_args=True,
            )
            mcmc.warmup(random.key(0), *problem.args)
            more = 5000 * k if bar else 50_000
            runs[f"{'bar' if bar else 'no bar'}, steps_per_draw={k}"] = mcmc, k, more

    def seconds(mcmc: MCMC, draws: int) -> float:
        mcmc.num_samples = draws
        begin = time.perf_counter()
        mcmc.run(random.key(1), *problem.args)
        jax.block_until_ready(mcmc.get_samples())
        return time.perf_counter() - begin

    measured = np.array(
        [
            [
                (seconds(mcmc, (short + more) // k) - seconds(mcmc, short // k)) / more
                for mcmc, k, more in runs.values()
            ]
            for _ in range(args.repeats)
        ]
    )
    rows = []
    for name, mine in zip(runs, measured.T, strict=True):
        row = {"run": name, "step, µs": float(np.median(mine)) * 1e6}
        row["ratio"] = float(np.median(mine / measured[:, 0]))
        rows.append(row)
        print(row, flush=True)
    return rows


# The first draw


def section_first_draw(args: argparse.Namespace) -> list[Row]:
    from first_draw import SYSTEMS

    found: dict[str, list[tuple[float, float]]] = {name: [] for name in SYSTEMS}
    for _ in range(args.repeats):
        for name, results in found.items():
            command = [sys.executable, str(HERE / "first_draw.py"), name]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds, memory = done.stdout.split()[-2:]
            results.append((float(seconds), float(memory)))
    nuts = np.array(found["NUTS"])
    rows = []
    for name, results in found.items():
        seconds, memory = np.array(results).T
        rows.append(
            {
                "system": name,
                "first draw, s": float(np.median(seconds)),
                "ratio to NUTS": float(np.median(seconds / nuts[:, 0])),
                "peak memory, MB": float(np.median(memory)),
            }
        )
        print(rows[-1], flush=True)
    return rows


# Two modes


def section_modes(args: argparse.Namespace) -> list[Row]:
    """Moves between the modes of a mixture, by mini-batches and by all rows."""
    from gaussian_mixture import (
        THETA,
        count_visits,
        mixture,
        model,
        tempered_log_posterior,
    )

    n, c_n, seconds = 10**5, 20.0, 2.0 if args.quick else 20.0
    x = mixture(*jnp.array(THETA)).sample(random.key(0), (n,))
    batches, whole = (partial(model, batch_size=m) for m in (1000, n))
    at_mode = init_to_value(
        values=dict(zip(("theta_1", "theta_2"), THETA, strict=True))
    )
    kernels = {
        "MHBT, m = 1000": (MHBT(batches, c_n=c_n), 1000),
        "MHBT, all rows": (MHBT(whole, c_n=c_n), 20),
        # At T = 1 the share is one half, too.
        "NUTS, T = 1": (NUTS(full_data(whole), init_strategy=at_mode), 5),
        "HMC, T = 1": (
            HMC(
                full_data(whole),
                trajectory_length=None,
                num_steps=10,
                init_strategy=at_mode,
            ),
            5,
        ),
    }
    runs = {}
    for name, (kernel, draws) in kernels.items():
        problem = Problem("two modes", batches, (x,))
        runs[name] = Run.begin(of_kernel(name, "", kernel, problem, draws, 100))
        print(f"  {name}: started in {runs[name].start:.1f} s", flush=True)
    for _ in range(args.repeats):
        for run in runs.values():
            run.go_on(seconds / args.repeats)
    grid = ((-3.5, 5.5, 90), (-6.0, 6.0, 90))
    log_p = np.asarray(tempered_log_posterior(x, n / c_n, grid))
    mass = np.exp(log_p - log_p.max()).sum(1)
    rows = []
    for name, run in runs.items():
        theta_2 = np.concatenate(run.draws)[:, 1]
        moves, total = count_visits(theta_2[None]), sum(run.seconds)
        rows.append(
            {
                "sampler": name,
                "moves": moves,
                "moves per second": moves / total,
                "share of the mode θ2 > 0": float(np.mean(theta_2 > 0)),
                "by quadrature": float(mass[45:].sum() / mass.sum()),
                "draws": len(theta_2),
                "seconds": total,
            }
        )
        print(rows[-1], flush=True)
    jax.clear_caches()
    return rows


def section_network(args: argparse.Namespace) -> list[Row]:
    import training_cost

    if not args.data:
        return []
    row = training_cost.measure(args.data / "mnist.npz", repeats=args.repeats)
    print(row, flush=True)
    return [row]


SECTIONS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "steps": section_steps,
    "chains": section_chains,
    "loop": section_loop,
    "first-draw": section_first_draw,
    "modes": section_modes,
    "network": section_network,
    "settings": section_settings,
    "speed": section_speed,
}
QUICK = "steps", "chains", "modes", "speed"
FOR_TARGETS = "steps", "chains", "first-draw", "modes", "speed"


def targets(results: dict[str, list[Row]]) -> list[Row]:
    """What the kernel is to reach, beside what the tables say; ratios within a run."""
    step = {row["n"]: row for row in results["steps"] if row["type"] == "float32"}
    (chains,) = (row for row in results["chains"] if row["chains"] == 64)
    first = {row["system"]: row["first draw, s"] for row in results["first-draw"]}
    moves = {row["sampler"]: row["moves per second"] for row in results["modes"]}
    at = {row["sampler"]: row for row in results["speed"] if row["n"] == 10**6}
    ours, peer = at["MHBT"], at["SGLD-CV"]

    def growth(system: str) -> float:
        small, large = step[10**4], step[10**7]
        times = large["bare step, µs"] / small["bare step, µs"]
        return float(times * large[system] / small[system])

    plain = "RSGLD, no control variate"
    others = max(rate for name, rate in moves.items() if name != "MHBT, m = 1000")
    found = [
        ("plain step / bare step", step[10**5][plain], "<=", 1.25),
        ("step of order 0 / bare step", step[10**5]["RSGLD, order 0"], "<=", 1.5),
        ("step of order 2 / bare step", step[10**5]["RSGLD, order 2"], "<=", 2.2),
        ("ESS/s / HMCECS", ours["ESS/s"] / at["HMCECS"]["ESS/s"], ">=", 3.0),
        ("ESS/s / NUTS", ours["ratio to NUTS"], ">=", 100.0),
        ("ESS/s / SGLD-CV", ours["ESS/s"] / peer["ESS/s"], ">=", 1.0),
        ("error of sds beside SGLD-CV", ours["sd error"], "<=", peer["sd error"]),
        (
            "error of means beside SGLD-CV",
            ours["mean error, sd"],
            "<=",
            peer["mean error, sd"],
        ),
        (
            "step at n = 10^7 / at 10^4, beside the bare step's",
            growth(plain),
            "<=",
            growth("bare, our rows"),
        ),
        (
            "moves between modes / any sampler of all rows",
            moves["MHBT, m = 1000"] / max(others, 1e-9),
            ">=",
            10.0,
        ),
        ("first draw / HMCECS's", first["MHBT"] / first["HMCECS, Taylor 2"], "<=", 1.0),
        ("first draw / NUTS's", first["MHBT"] / first["NUTS"], "<=", 1.5),
        ("64 chains / one", chains["MHBT, times one"], "<=", 30.0),
        (
            "64 chains that share batches / one",
            chains["MHBT, shared batches, times one"],
            "<=",
            30.0,
        ),
    ]
    return [
        {
            "target": name,
            "measured": value,
            "wanted": f"{sign} {bound:.3g}",
            "met": "yes" if (value <= bound) == (sign == "<=") else "**no**",
        }
        for name, value, sign, bound in found
    ]


def cell(value: Any) -> str:
    if not isinstance(value, float):
        return str(value)
    if value == np.inf:
        return "not yet"
    return np.format_float_positional(float(f"{value:.3g}"), trim="-")


def table(rows: list[Row]) -> str:
    lines = [
        f"| {' | '.join(rows[0])} |",
        "| --- " * len(rows[0]) + "|",
        *(f"| {' | '.join(map(cell, row.values()))} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def tables_of_speed(rows: list[Row]) -> str:
    """One for each problem, the setting last: a phone shows the first columns."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        row = dict(row)
        name, n, d, setting = (row.pop(k) for k in ("problem", "n", "d", "setting"))
        title = f"**{name}**, n = {n}, d = {d}\n\n"
        row["setting"] = setting.replace(" ", "\N{NO-BREAK SPACE}")
        found.setdefault(title, []).append(row)
    return "\n".join(title + table(some) for title, some in found.items())


def read_results(path: Path) -> dict[str, Any]:
    """JSON has no infinity."""
    results = json.loads(path.read_text()) if path.exists() else {}
    for name in results.keys() - {"machine"}:
        results[name] = [
            {key: np.inf if value is None else value for key, value in row.items()}
            for row in results[name]
        ]
    return results


def publish(args: argparse.Namespace, name: str, rows: list[Row]) -> None:
    """A table in Markdown, and the figures in the file of all results."""
    path = args.out / "results.json"
    results = read_results(path)
    results["machine"] = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "jax": jax.__version__,
        "numpyro": numpyro.__version__,
    }
    if name == "speed":
        rows = merge_problems(results.get(name, []), rows)
    results[name] = rows
    kept = {
        key: value
        if key == "machine"
        else [{k: None if v == np.inf else v for k, v in row.items()} for row in value]
        for key, value in results.items()
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")
    write_table(args.out, name, rows)


def merge_problems(before: list[Row], rows: list[Row]) -> list[Row]:
    """Ratios are within a problem: others measured before stay, where they stood."""

    def place(row: Row) -> tuple[int, int]:
        return ORDER.index(row["problem"]), -row["n"]

    new = {place(row) for row in rows}
    return sorted([*rows, *(r for r in before if place(r) not in new)], key=place)


def write_table(out: Path, name: str, rows: list[Row]) -> None:
    if rows:
        make = tables_of_speed if name == "speed" else table
        (out / f"{name}.md").write_text(make(rows))
        if name == "speed":
            plot_speed(rows, out / "speed.png")


def draw_growth(out: Path) -> None:
    results = read_results(out / "results.json")
    if {"steps", "chains"} <= results.keys():
        plot_growth(results["steps"], results["chains"], out / "growth.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--data", type=Path, help="folder of the real data")
    parser.add_argument("--quick", action="store_true", help="under five minutes")
    parser.add_argument("--targets", action="store_true", help="what they ask for only")
    parser.add_argument("--only", nargs="+", choices=SECTIONS)
    parser.add_argument("--problems", nargs="+", help="of the section speed")
    parser.add_argument("--tables", action="store_true", help="measure nothing")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"))
    args = parser.parse_args()
    if args.tables:
        for name, rows in read_results(args.out / "results.json").items():
            if name != "machine":
                write_table(args.out, name, rows)
        draw_growth(args.out)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    chosen = QUICK if args.quick else FOR_TARGETS if args.targets else SECTIONS
    begin = time.perf_counter()
    for name in args.only or chosen:
        print(f"== {name}, at {time.perf_counter() - begin:.0f} s", flush=True)
        publish(args, name, SECTIONS[name](args))
    with suppress(KeyError):  # not all that they ask for has been measured
        publish(args, "targets", targets(read_results(args.out / "results.json")))
    draw_growth(args.out)


if __name__ == "__main__":
    main()
