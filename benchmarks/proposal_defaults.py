"""
Which coin, β and target acceptance should RSGLD have by default?

Eight models at the temperature that the kernel chooses (where a pilot run finds it, it
may differ a little between proposals; that of the default is shown). Each setting gets
the same number of gradients; what counts is the smallest effective sample size of any
coordinate (bulk, four chains), by 1000 gradients.

    python benchmarks/proposal_defaults.py --output table.md
"""

from __future__ import annotations

import argparse
from pathlib import Path
import warnings

import jax
from jax import random
from models import SYNTHETIC, Problem
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC

from numpyro_mhbt import MHBT, RSGLD, SGLD, RandomWalk

PROBLEMS = (
    "gaussian",
    "logistic",
    "poisson",
    "robust",
    "mixture",
    "hierarchical",
    "network",
    "funnel",
)
DEFAULT = "RSGLD coin 0.95, β 1, target 0.45"
SETTINGS = {
    DEFAULT: (RSGLD(), 0.45),
    **{
        f"RSGLD coin {coin}, β {beta:g}, target 0.45": (
            RSGLD(beta=beta, forward_prob=coin),
            0.45,
        )
        for coin, beta in ((0.5, 1), (0.5, 2), (0.8, 1), (0.95, 2))
    },
    **{
        f"RSGLD coin 0.95, β 1, target {target}": (RSGLD(), target)
        for target in (0.3, 0.57, 0.7)
    },
    "SGLD, target 0.45": (SGLD(), 0.45),
    f"{DEFAULT}, noise='tempered'": (RSGLD(noise="tempered"), 0.45),
    "RandomWalk, target 0.3": (RandomWalk(), 0.3),
}
WARMUP, DRAWS, CHAINS = 1500, 3000, 4


def run(problem: Problem, kernel: MHBT, draws: int) -> MCMC:
    mcmc = MCMC(
        kernel,
        num_warmup=WARMUP,
        num_samples=draws,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # poor settings are the point here
        mcmc.run(random.key(1), *problem.args)
    return mcmc


def efficiency(mcmc: MCMC) -> float:
    """Smallest effective sample size by 1000 gradients; 0 if a chain never moved."""
    draws = mcmc.get_samples(group_by_chain=True).values()
    flat = np.concatenate(
        [np.asarray(x).reshape(*x.shape[:2], -1) for x in draws], axis=2
    )
    if np.any(flat.std(axis=1) == 0):
        return 0.0
    return effective_sample_size(flat).min() / (flat.shape[0] * flat.shape[1]) * 1000


def study(name: str) -> tuple[float, dict[str, float]]:
    """The temperature of the default, and the efficiency of each setting."""
    problem = SYNTHETIC[name]()
    temperatures, found = {}, {}
    for label, (proposal, target) in SETTINGS.items():
        mcmc = run(
            problem, MHBT(problem.model, proposal, target_accept_prob=target), DRAWS
        )
        temperatures[label] = float(mcmc.last_state.temperature[0])
        found[label] = efficiency(mcmc)
        print(
            f"{name}: {label}: T = {temperatures[label]:.3g}, {found[label]:.2f}",
            flush=True,
        )
        jax.clear_caches()  # the programs of many kernels do not fit in memory
    return temperatures[DEFAULT], found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--only", nargs="+", default=PROBLEMS, choices=PROBLEMS)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    results = {name: study(name) for name in args.only}
    heads = [f"{name} (T = {heat:.3g})" for name, (heat, _) in results.items()]
    lines = [f"| setting | {' | '.join(heads)} | geometric mean |"]
    lines.append("| --- " * (len(heads) + 2) + "|")
    for label in SETTINGS:
        row = [found[label] for _, found in results.values()]
        mean = np.exp(np.mean(np.log(np.maximum(row, 0.01))))
        cells = " | ".join(f"{x:.2f}" for x in [*row, mean])
        lines.append(f"| {label} | {cells} |")
    table = "\n".join(lines)
    print(table)
    if args.output is not None:
        args.output.write_text(table + "\n")


if __name__ == "__main__":
    main()
