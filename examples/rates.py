"""
How far the draws are from the tempered posterior, and how cold one may go.

The theorems of the paper made visible on the mean of a Gaussian (d = 4, n = 10^5).

Left: Kullback-Leibler divergence between draws and tempered posterior. Over batches the
mean of m rows has variance (1 - m/n)/m, and with it the chain's marginal is a Gaussian
whose variance is larger by r = 1 / (1 - (c/m)(1 - m/n)), so that the divergence is
d/2 (r - 1 - log r): it depends on c/m alone, and vanishes with it. With the correction
(``bias_correction=True``) it is gone.

Right: the scale c_n that ``MHBT(model)`` chooses so that the noise variance is 1. It
grows like sqrt(m) without a control variate, as the paper advises, and like m/d with
one of order 0.

    python examples/rates.py
"""

from __future__ import annotations

import argparse
from functools import partial
import json
from pathlib import Path

from acceptance_rates import model
import jax
from jax import lax, random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from numpyro_mhbt import MHBT, RandomWalk, Taylor

DIM = 4


def divergence(ratio: np.ndarray | float, dim: int = DIM) -> np.ndarray:
    """Of two Gaussians with the same mean whose variances have this ratio."""
    return dim / 2 * (ratio - 1 - np.log(ratio))


def variance_ratios(
    x: jax.Array, m: int, scales: np.ndarray, correct: bool, repeats: int, steps: int
) -> np.ndarray:
    """Variance of the draws over that of the tempered posterior, for each c_n."""
    kernel = MHBT(model, RandomWalk(), c_n=scales[0], bias_correction=correct)
    c_n = jnp.repeat(jnp.asarray(scales), repeats)
    n, args = len(x), (x, m)
    keys = random.split(random.key(0), len(c_n))
    mean = n / (n + 1) * jnp.mean(x, 0)
    sd = jnp.sqrt(n / c_n / (n + 1))
    unit = random.normal(random.key(1), (len(c_n), DIM))
    state = kernel.init(keys, 0, {"theta": mean + sd[:, None] * unit}, args, {})
    # Chains of one compiled run, each at its own temperature.
    state = state._replace(temperature=n / c_n, step_size=1.1 * sd)
    state = kernel.refresh(state, args, {})

    @partial(jax.jit, static_argnums=2)
    def run(state: object, x: jax.Array, length: int) -> tuple[object, jax.Array]:
        def step(state: object, _: None) -> tuple[object, jax.Array]:
            state = kernel.sample(state, (x, m), {})
            return state, jnp.sum((state.z["theta"] - mean) ** 2, -1)

        state, squares = lax.scan(step, state, None, length=length)
        return state, squares.mean(0)

    state, _ = run(state, x, steps // 5)
    squares = np.asarray(run(state, x, steps)[1]) / np.asarray(sd) ** 2 / DIM
    return squares.reshape(len(scales), repeats).mean(1)


def chosen_scale(x: jax.Array, m: int, control: Taylor | None) -> float:
    """The c_n at which the noise variance is 1."""
    kernel = MHBT(model, RandomWalk(), control_variate=control)
    state = kernel.init(random.key(0), 0, None, (x, m), {})
    return len(x) / float(state.temperature)


def plot(ratios: dict, scales: dict, n: int, path: str) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5))
    for k, (m, correct, shares, found) in enumerate(ratios):
        label = f"m = {m}" + (", corrected" if correct else "")
        style = "x" if correct else "o"
        left.loglog(
            shares, divergence(np.array(found)), style, color=f"C{k}", label=label
        )
    share = np.geomspace(0.008, 0.6, 100)
    left.loglog(share, divergence(1 / (1 - share)), "k-", lw=1, label="predicted")
    left.set(
        xlabel=r"$c_n / m$",
        ylabel="KL divergence from the tempered posterior",
        title=f"Bias of the draws (d = {DIM}, n = {n:,})",
    )
    left.legend(fontsize=8)
    for k, (d, control, sizes, found) in enumerate(scales):
        name = "no control variate" if control is None else "order 0"
        right.loglog(sizes, found, "o-", color=f"C{k}", label=f"d = {d}, {name}")
    sizes = np.array(scales[0][2], float)
    right.loglog(sizes, np.sqrt(sizes), "k:", lw=1, label=r"$\sqrt{m}$")
    for d in sorted({s[0] for s in scales}):
        right.loglog(sizes, sizes / d, "k--", lw=1, label=f"$m / {d}$")
    right.set(
        xlabel="batch size m",
        ylabel=r"$c_n$ at noise variance 1",
        title="How cold one may go",
        ylim=(2, 8000),
    )
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--rows", type=int, default=10**5)
    parser.add_argument("--sizes", type=int, nargs="+", default=[100, 400, 1600])
    parser.add_argument("--repeats", type=int, default=32, help="chains for each c_n")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--smoke", action="store_true", help="seconds, on less data")
    parser.add_argument("--out", default="rates.png")
    args = parser.parse_args()
    shares, wide = np.geomspace(0.01, 0.5, 8), (2, 10)
    if args.smoke:
        args.rows, args.sizes, args.repeats, args.steps = 1000, [20], 2, 20
        shares, wide = np.array([0.1, 0.3]), (2,)

    x = random.normal(random.key(0), (args.rows, DIM))
    ratios = []
    for m, correct in [(m, False) for m in args.sizes] + [(args.sizes[0], True)]:
        found = variance_ratios(x, m, shares * m, correct, args.repeats, args.steps)
        fraction = shares * (1 - m / args.rows)
        expected = 1.0 if correct else 1 / (1 - fraction)
        print(
            f"m = {m}, corrected: {correct}: largest error of the variance ratio "
            f"{np.abs(found / expected - 1).max():.3f}",
            flush=True,
        )
        ratios.append((m, correct, fraction.tolist(), found.tolist()))
        jax.clear_caches()
    scales = []
    for d in wide:
        y = random.normal(random.key(d), (args.rows, d))
        for control in (None, Taylor(order=0)):
            found = [chosen_scale(y, m, control) for m in args.sizes]
            print(f"d = {d}, {control}: c_n = {np.round(found, 1)}", flush=True)
            order = None if control is None else control.order
            scales.append((d, order, args.sizes, found))
            jax.clear_caches()
    saved = {"variance ratios": ratios, "scales": scales}
    Path(args.out).with_suffix(".json").write_text(json.dumps(saved))
    plot(ratios, scales, args.rows, args.out)
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
