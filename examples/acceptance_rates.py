"""
Acceptance of SGLD and RSGLD proposals against learning rate and dimension.

Figure 1 of the paper: the mean of a d-dimensional Gaussian, n = 10^4 rows, batches of
1000, c_n = 20, 2000 steps from the origin. Panel (a) is the largest learning rate at
which SGLD still accepts half, or a tenth, of its moves; the others compare SGLD with
RSGLD, whose ratio is taken both with the normalised density of the mixture and, as in
the paper's proof and figures, without the factor beta^-d. Two more curves show SGLD
with the terms of the log-density that depend on the data alone (the paper leaves them
out, NumPyro does not), and with the Langevin noise of the tempered posterior,
sqrt(2 ε / c_n) instead of the paper's sqrt(2 ε) / n.

    python examples/acceptance_rates.py
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
import warnings

import jax
from jax import lax, random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_mhbt import MHBT, RSGLD, SGLD, Taylor

CURVES = {
    "SGLD": SGLD(noise="paper"),
    "RSGLD β = 1": RSGLD(forward_prob=0.5, noise="paper"),
    "RSGLD β = 2, without β⁻ᵈ": RSGLD(
        beta=2.0, forward_prob=0.5, noise="paper", hastings="paper"
    ),
    "RSGLD β = 2, normalised": RSGLD(beta=2.0, forward_prob=0.5, noise="paper"),
    "SGLD, terms of the data kept": SGLD(noise="paper"),
    "SGLD, noise of the target": SGLD(noise="tempered"),
}
STYLES = ("k-", "C0-", "C1-", "C1--", "k:", "C2-.")


def model(x: jax.Array, batch_size: int) -> None:
    d = x.shape[1]
    theta = numpyro.sample("theta", dist.Normal(0, 1).expand([d]).to_event(1))
    with numpyro.plate("N", len(x), subsample_size=batch_size):
        rows = numpyro.subsample(x, event_dim=1)
        numpyro.sample("x", dist.Normal(theta, 1).to_event(1), obs=rows)


def acceptance(
    name: str, x: jax.Array, rates: np.ndarray, batch_size: int, steps: int
) -> np.ndarray:
    """Mean acceptance probability at each learning rate, one chain for each."""
    # It takes away what depends on the data alone.
    origin = Taylor(order=0, ref_params={"theta": jnp.zeros(x.shape[1])})
    kernel = MHBT(
        model,
        CURVES[name],
        c_n=20,
        control_variate=None if "kept" in name else origin,
        bias_correction=False,
    )
    keys = random.split(random.key(0), len(rates))
    start = {"theta": jnp.zeros((len(rates), x.shape[1]))}
    state = kernel.init(keys, 0, start, (x, batch_size), {})
    state = state._replace(step_size=jnp.asarray(rates, state.step_size.dtype))

    @jax.jit
    def run(state: object, x: jax.Array) -> jax.Array:
        def step(state: object, _: None) -> tuple[object, jax.Array]:
            state = kernel.sample(state, (x, batch_size), {})
            return state, state.accept_prob

        return lax.scan(step, state, None, length=steps)[1].mean(0)

    return np.asarray(run(state, x))


def largest_rate(rates: np.ndarray, accepted: np.ndarray, level: float) -> float:
    """Where acceptance falls below ``level``: 0 if at all rates, inf if at none."""
    below = np.flatnonzero(accepted < level)
    if not len(below):
        return float("inf")
    i = below[0]
    if i == 0:
        return 0.0
    share = (accepted[i - 1] - level) / (accepted[i - 1] - accepted[i])
    return float(np.exp(np.log(rates[i - 1 : i + 1]) @ [1 - share, share]))


def plot(rates: np.ndarray, results: dict[int, dict], path: str) -> None:
    dims = list(results)
    figure, axes = plt.subplots(2, 2, figsize=(10, 7.5))
    first, *others = axes.ravel()
    for level, mark in ((0.5, "o-"), (0.1, "s--")):
        found = [largest_rate(rates, results[d]["SGLD"], level) for d in dims]
        first.loglog(dims, found, mark, label=f"acceptance ≥ {level}")
    guide = np.array(dims, float)
    anchor = largest_rate(rates, results[dims[-1]]["SGLD"], 0.5)
    first.loglog(
        guide, anchor * (guide / guide[-1]) ** -0.25, "k:", lw=1, label=r"$d^{-1/4}$"
    )
    first.set(
        xlabel="dimension d",
        ylabel="largest learning rate ε",
        title="(a) SGLD: the largest learning rate",
    )
    first.legend()
    for axis, d, letter in zip(others, dims[1:], "bcd", strict=False):
        for (name, accepted), style in zip(results[d].items(), STYLES, strict=True):
            axis.semilogx(rates, accepted, style, label=name)
        axis.set(
            xlabel="learning rate ε",
            ylabel="mean acceptance probability",
            title=f"({letter}) d = {d}",
            ylim=(-0.02, 1.02),
        )
    figure.legend(*others[0].get_legend_handles_labels(), loc="lower center", ncol=3)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--rows", type=int, default=10**4)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--dims", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--smoke", action="store_true", help="seconds, on less data")
    parser.add_argument("--out", default="acceptance_rates.png")
    args = parser.parse_args()
    if args.smoke:
        args.rows, args.batch_size, args.steps, args.dims = 500, 50, 20, [1, 5]
    rates = np.geomspace(1e-9, 1e-2, 8 if args.smoke else 29)
    warnings.filterwarnings("ignore", "MHBT: .* next to nothing")  # the point here
    results: dict[int, dict[str, np.ndarray]] = {}
    for d in args.dims:
        x = random.normal(random.key(d), (args.rows, d))
        results[d] = {}
        for name in CURVES:
            accepted = acceptance(name, x, rates, args.batch_size, args.steps)
            results[d][name] = accepted
            half, tenth = (largest_rate(rates, accepted, level) for level in (0.5, 0.1))
            print(
                f"d = {d}, {name}: accepts half up to ε = {half:.2g}, a tenth up to "
                f"{tenth:.2g}",
                flush=True,
            )
        jax.clear_caches()
    table = {d: {k: v.tolist() for k, v in by.items()} for d, by in results.items()}
    saved = {"rates": rates.tolist(), "acceptance": table}
    Path(args.out).with_suffix(".json").write_text(json.dumps(saved))
    plot(rates, results, args.out)
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
