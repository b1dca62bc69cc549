"""
Which modes a chain visits: MHBT and Metropolis-Hastings on all rows.

Figure 2(d)-(f) of the paper: the two-component Gaussian mixture of
``gaussian_mixture.py`` with components ever further apart (theta_1 = 0, theta_2 = 0.5,
2 and 4). The posterior has one mode at (0, theta_2) and one at (theta_2, -theta_2).
MHBT runs at T = n / c_n, for two values of c_n; the chain on all rows samples the
posterior itself, starts in a mode, and makes fewer steps, since each costs a hundred
times as much. All are random walks whose steps are tuned in warm-up.

    python examples/mode_hopping.py
"""

from __future__ import annotations

import argparse

from gaussian_mixture import mixture, model
from jax import random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from numpyro.infer import MCMC, init_to_value

from numpyro_mhbt import MHBT, RandomWalk

THETA_2 = (0.5, 2.0, 4.0)
STEPS = 10  # from one draw to the next


def visits(theta_2: np.ndarray, mode: float) -> int:
    """Changes from one mode to the other: from beyond half way to beyond half way."""
    side = np.sign(theta_2[np.abs(theta_2) > mode / 2])
    return int(np.sum(side[1:] != side[:-1]))


def run(kernel: MHBT, x: object, batch_size: int | None, draws: int) -> np.ndarray:
    mcmc = MCMC(kernel, num_warmup=draws // 10, num_samples=draws)
    mcmc.run(random.key(1), x, batch_size, extra_fields=("accept_prob",))
    rate = float(mcmc.get_extra_fields()["accept_prob"].mean())
    print(f"mean acceptance {rate:.2f}")
    return np.asarray(mcmc.get_samples()["theta_2"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--rows", type=int, default=10**5)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--c-n", type=float, nargs="+", default=[20.0, 10.0])
    parser.add_argument("--draws", type=int, default=10_000)
    parser.add_argument("--draws-all-rows", type=int, default=2000)
    parser.add_argument("--smoke", action="store_true", help="seconds, on less data")
    parser.add_argument("--out", default="mode_hopping.png")
    args = parser.parse_args()
    if args.smoke:
        args.rows, args.batch_size = 2000, 100
        args.draws = args.draws_all_rows = 200

    rows = len(args.c_n) + 1
    figure, axes = plt.subplots(rows, 3, figsize=(12, 2.6 * rows), sharey="col")
    for column, true in zip(axes.T, THETA_2, strict=True):
        theta = jnp.array([0.0, true])
        x = mixture(*theta).sample(random.key(0), (args.rows,))
        near = init_to_value(values={"theta_1": theta[0], "theta_2": theta[1]})
        chains = {}
        for c_n in args.c_n:
            kernel = MHBT(model, RandomWalk(), c_n=c_n, steps_per_draw=STEPS)
            name = f"MHBT, c = {c_n:g}, T = {args.rows / c_n:g}"
            chains[name] = run(kernel, x, args.batch_size, args.draws)
        kernel = MHBT(model, RandomWalk(0.1), steps_per_draw=STEPS, init_strategy=near)
        chains["all rows, T = 1"] = run(kernel, x, None, args.draws_all_rows)
        for axis, (name, draws) in zip(column, chains.items(), strict=True):
            hops = visits(draws, true)
            share = float(np.mean(draws > 0))
            print(
                f"theta_2 = {true}: {name}: {hops} moves between the modes, "
                f"{share:.2f} of the draws at the first",
                flush=True,
            )
            every = max(1, len(draws) // 5000)
            steps = STEPS * np.arange(len(draws))
            axis.plot(steps[::every], draws[::every], lw=0.4)
            for mode in (true, -true):
                axis.axhline(mode, color="red", lw=1)
            # At c = 10 draws wander off at times, where one component fits all rows.
            axis.set(ylim=(-true - 4, true + 4))
            axis.set_title(f"{name}: {hops} moves", fontsize=10)
        column[0].annotate(
            rf"modes at $\theta_2 = \pm {true:g}$",
            (0.5, 1.22),
            xycoords="axes fraction",
            ha="center",
        )
        column[-1].set_xlabel("step")
    for row in axes:
        row[0].set_ylabel(r"$\theta_2$")
    figure.tight_layout()
    figure.savefig(args.out, dpi=110)
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
