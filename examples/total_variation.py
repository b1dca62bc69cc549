"""
How fast MHBT comes to the tempered posterior, beside a chain that sees all rows.

Figure 2(a) of the paper: the mean of a Gaussian in d = 2 and 5 dimensions with prior
N(0, I), n = 10^5 rows, batches of 1000, a random walk that accepts about 0.3 of its
moves. Many chains start at the prior; after each step the total variation distance
between their positions and as many exact draws of the tempered posterior is taken on a
grid. The chains on all rows have the same target and steps; all rows enter through
their mean, which for a Gaussian is the same density up to a constant.

MHBT is run with its default control variate, which takes the noise of the batches at
the mode away. At the first c_n it is also run to the letter of Algorithm 1, with the
densities as NumPyro has them (``control_variate=None``), and with the terms left out
that depend on the data alone, which is the same as an expansion around zero.

    python examples/total_variation.py
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
import warnings

from acceptance_rates import model
import jax
from jax import lax, random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from tqdm.auto import tqdm

from numpyro_mhbt import MHBT, RandomWalk, Taylor

AT_ONCE = 1000
CLOSE = 0.2
STEP = {2: 2.0, 5: 1.05}  # standard deviations of the target, for acceptance near 0.3


def on_all_rows(mean: jax.Array, n: int) -> None:
    prior = dist.Normal(0, 1).expand(mean.shape).to_event(1)
    theta = numpyro.sample("theta", prior)
    numpyro.sample("mean", dist.Normal(theta, n**-0.5).to_event(1), obs=mean)


def positions(
    kernel: MHBT, args: tuple, d: int, num_chains: int, steps: int, name: str
) -> tuple[np.ndarray, float]:
    """Where each chain is after each step, and the mean acceptance of the last half."""

    @jax.jit
    def run(state: object, arrays: tuple) -> tuple[jax.Array, jax.Array]:
        def step(state: object, _: None) -> tuple[object, tuple]:
            state = kernel.sample(state, (*arrays, *args[1:]), {})
            return state, (state.z["theta"], state.accept_prob)

        return lax.scan(step, state, None, length=steps)[1]

    found, rates = [], []
    at_once = min(AT_ONCE, num_chains)
    for part in tqdm(range(num_chains // at_once), desc=name):
        key_start, key_chains = random.split(random.key(part))
        start = {"theta": random.normal(key_start, (at_once, d))}
        keys = random.split(key_chains, at_once)
        state = kernel.init(keys, 0, start, args, {})
        theta, rate = run(state, args[:1])
        found.append(np.concatenate([np.asarray(start["theta"])[None], theta]))
        rates.append(float(rate[steps // 2 :].mean()))
    return np.concatenate(found, axis=1), float(np.mean(rates))


def total_variation(draws: np.ndarray, exact: np.ndarray, bins: int) -> float:
    """On a grid of ``bins`` cells a side over four standard deviations, and outside."""

    def counts(unit: np.ndarray) -> dict[tuple, int]:
        cells = np.clip(np.floor((unit + 4) * bins / 8), -1, bins).astype(np.int64)
        code = cells @ (bins + 2) ** np.arange(unit.shape[1])
        return dict(zip(*np.unique(code, return_counts=True), strict=True))

    a, b = counts(draws), counts(exact)
    gaps = [abs(a.get(c, 0) - b.get(c, 0)) for c in a.keys() | b.keys()]
    return sum(gaps) / 2 / len(draws)


def table(results: dict[str, dict]) -> str:
    lines = [
        f"| | steps until the distance is below {CLOSE} | acceptance |",
        "| --- | --- | --- |",
    ]
    for name, result in results.items():
        below = np.flatnonzero(np.array(result["distance"]) < CLOSE)
        steps = below[0] if len(below) else "not yet"
        lines.append(f"| {name} | {steps} | {result['acceptance']:.2f} |")
    return "\n".join(lines)


def plot(results: dict[str, dict], path: str) -> None:
    dims = sorted({r["d"] for r in results.values()})
    scales = list(dict.fromkeys(r["c_n"] for r in results.values()))
    styles = {"all rows": "--", "around zero": "-.", "no control variate": ":"}
    figure, axes = plt.subplots(
        1, len(dims), figsize=(6 * len(dims), 4.8), squeeze=False
    )
    for axis, d in zip(axes[0], dims, strict=True):
        floor = 0.0
        for result in results.values():
            if result["d"] == d:
                label, color = result["label"], f"C{scales.index(result['c_n'])}"
                style = next((v for k, v in styles.items() if k in label), "-")
                axis.semilogy(result["distance"], style, color=color, label=label)
                floor = max(floor, result["floor"])
        axis.axhline(floor, color="grey", lw=1, label="two exact samples")
        axis.set(xlabel="step", ylabel="total variation distance", title=f"d = {d}")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(), loc="lower center", ncol=4, fontsize=9
    )
    figure.tight_layout(rect=(0, 0.14, 1, 1))
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--rows", type=int, default=10**5)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--chains", type=int, default=10_000, help="the paper has 10^5")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--c-n", type=float, nargs="+", default=[20.0, 5.0, 10.0, 30.0])
    parser.add_argument("--dims", type=int, nargs="+", default=[2, 5])
    parser.add_argument("--smoke", action="store_true", help="seconds, on less data")
    parser.add_argument("--out", default="total_variation.png")
    args = parser.parse_args()
    if args.smoke:
        args.rows, args.batch_size, args.chains, args.steps = 1000, 50, 100, 10
        args.c_n, args.dims = [5.0], [2]
    warnings.filterwarnings("ignore", "MHBT: no plate")

    results: dict[str, dict] = {}
    for d in args.dims:
        x = 2 + random.normal(random.key(d), (args.rows, d))
        n, mean = args.rows, np.asarray(x, np.float64).mean(0)
        for c_n in args.c_n:
            center, sd = n / (n + 1) * mean, math.sqrt(n / c_n / (n + 1))
            walk = RandomWalk(STEP[d] * sd)
            fixed = {"temperature": n / c_n, "bias_correction": False}
            mode, origin = (
                Taylor(order=0, ref_params={"theta": jnp.asarray(at, x.dtype)})
                for at in (center, np.zeros(d))
            )
            whole = MHBT(on_all_rows, walk, control_variate=None, **fixed)
            runs = {f"all rows, c = {c_n:g}": (whole, (jnp.asarray(mean, x.dtype), n))}
            controls = {"": mode}
            if c_n == args.c_n[0]:
                controls |= {", no control variate": None, ", around zero": origin}
            for name, control in controls.items():
                kernel = MHBT(model, walk, control_variate=control, **fixed)
                runs[f"MHBT, c = {c_n:g}{name}"] = (kernel, (x, args.batch_size))
            rng = np.random.default_rng(0)
            exact, other = rng.standard_normal((2, args.chains, d))
            # About as many cells as keep ten chains each.
            bins = max(4, round((args.chains / 10) ** (1 / d)))
            for label, (kernel, data) in runs.items():
                name = f"d = {d}, {label}"
                path, rate = positions(kernel, data, d, args.chains, args.steps, name)
                distance = [
                    total_variation((at - center) / sd, exact, bins) for at in path
                ]
                floor = total_variation(other, exact, bins)
                results[name] = {
                    "d": d,
                    "c_n": c_n,
                    "label": label,
                    "acceptance": rate,
                    "distance": distance,
                    "floor": floor,
                }
                print(
                    f"{name}: acceptance {rate:.2f}, distance {distance[-1]:.3f} after "
                    f"{args.steps} steps (two exact samples: {floor:.3f})",
                    flush=True,
                )
            jax.clear_caches()
    Path(args.out).with_suffix(".json").write_text(json.dumps(results))
    plot(results, args.out)
    print(table(results))
    print(f"saved {args.out}: {args.chains} chains")


if __name__ == "__main__":
    main()
