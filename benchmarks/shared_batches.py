"""
What ``share_batches=True`` takes from the independence of chains.

The logistic regression of ``step_cost.py``. If chains were independent, the variance of
a mean over all of them would be that of one chain's mean over their number. Here is
the ratio of the two (batch means of 200 draws, averaged over coordinates), with shared
batches and without; the latter is 1 but for Monte Carlo error.

    python benchmarks/shared_batches.py --chains 64
"""

from __future__ import annotations

import argparse
import warnings

import jax
from jax import lax, random
import numpy as np
import step_cost

from numpyro_mhbt import MHBT, MHBTState, Taylor

WARMUP, DRAWS, LENGTH = 1500, 12_000, 200
SETTINGS: dict[str, dict] = {
    "no control variate": {"control_variate": None},
    "order 0": {},
    "order 0, c_n = 100": {"c_n": 100.0},
    "order 1": {"control_variate": Taylor(order=1)},
    "order 2": {"control_variate": Taylor(order=2)},
}


def measure(kernel: MHBT, data: tuple, chains: int) -> tuple[float, MHBTState]:
    """How much larger the variance of a mean is than that of independent chains."""
    keys = random.split(random.key(3), chains)
    state = kernel.init(keys, WARMUP, None, data, {})

    def draw(state: MHBTState, _: None) -> tuple[MHBTState, jax.Array]:
        state = kernel.sample(state, data, {})
        return state, state.z["w"]

    @jax.jit
    def run(state: MHBTState) -> tuple[MHBTState, jax.Array]:
        state = lax.scan(draw, state, None, length=WARMUP)[0]
        return lax.scan(draw, state, None, length=DRAWS)

    state, w = run(state)
    means = np.asarray(w, float).reshape(-1, LENGTH, chains, step_cost.DIM).mean(1)
    alone = means.var(0, ddof=1).mean(0) / chains
    together = means.mean(1).var(0, ddof=1)
    return float(np.mean(together / alone)), state


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--chains", type=int, default=64)
    args = parser.parse_args()
    warnings.filterwarnings("ignore", "MHBT: ")
    data = step_cost.make_data(10**5)
    print("| | T | noise variance | own batches | shared batches |")
    print("| --- " * 5 + "|")
    for name, options in SETTINGS.items():
        ratios = []
        for share in (False, True):
            kernel = MHBT(step_cost.model, share_batches=share, **options)
            ratio, state = measure(kernel, data, args.chains)
            ratios.append(f"{ratio:.2f}")
        heat = float(state.temperature[0])
        noise = float(np.median(state.mean_noise_variance))
        print(f"| {name} | {heat:.4g} | {noise:.2g} | {' | '.join(ratios)} |")


if __name__ == "__main__":
    main()
