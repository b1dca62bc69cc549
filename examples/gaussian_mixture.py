"""
Both modes of a two-component Gaussian mixture, from mini-batches.

    x_i ~ 0.5 N(theta_1, 2) + 0.5 N(theta_1 + theta_2, 2)

The posterior has two modes, since the components may swap. With 10^5 rows they are so
narrow that a chain on all rows never leaves the one it starts in. MHBT runs at
temperature T = n / c_n, sees 1000 rows a step, and visits both.

Prints the summary, the share of the draws in each mode beside that of quadrature, and
saves a picture of the draws over the contours of the tempered posterior, which is
computed from all rows on a grid (Figure 2(b) and (c) of the paper).

    python examples/gaussian_mixture.py
"""

from __future__ import annotations

import argparse
from functools import partial
import time

import arviz as az
import jax
from jax import lax, random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_mhbt import MHBT

THETA = (0.0, 2.0)


def mixture(theta_1: jax.Array, theta_2: jax.Array) -> dist.Distribution:
    locs = jnp.stack([theta_1, theta_1 + theta_2])
    weights = dist.Categorical(probs=jnp.array([0.5, 0.5]))
    return dist.MixtureSameFamily(weights, dist.Normal(locs, jnp.sqrt(2.0)))


def model(x: jax.Array, batch_size: int) -> None:
    theta_1 = numpyro.sample("theta_1", dist.Normal(0, jnp.sqrt(10.0)))
    theta_2 = numpyro.sample("theta_2", dist.Normal(0, 1))
    with numpyro.plate("N", len(x), subsample_size=batch_size):
        obs = numpyro.subsample(x, event_dim=0)
        numpyro.sample("x", mixture(theta_1, theta_2), obs=obs)


@partial(jax.jit, static_argnums=2)
def tempered_log_posterior(x: jax.Array, temperature: float, grid: tuple) -> jax.Array:
    """log of the posterior of all rows raised to 1/T, on a grid."""

    def at(theta: jax.Array) -> jax.Array:
        prior = dist.Normal(0, jnp.sqrt(10.0)).log_prob(theta[0])
        prior += dist.Normal(0, 1).log_prob(theta[1])
        return (prior + mixture(*theta).log_prob(x).sum()) / temperature

    points = jnp.stack(jnp.meshgrid(*(jnp.linspace(*g) for g in grid)), -1)
    return lax.map(at, points.reshape(-1, 2)).reshape(points.shape[:2])


def count_visits(theta_2: np.ndarray) -> int:
    """Changes between the modes (theta_2 near +2 and near -2), over all chains."""
    visits = 0
    for chain in theta_2:
        side = np.sign(chain[np.abs(chain) > 1])
        visits += int(np.sum(side[1:] != side[:-1]))
    return visits


def compare_mass(theta_2: np.ndarray, log_p: np.ndarray) -> str:
    """Share of the mode with theta_2 > 0: of the draws, and by quadrature."""
    first = theta_2 > 0
    error = first.std() / np.sqrt(float(az.ess(first.astype(float))))
    density = np.exp(log_p - log_p.max())
    half = len(density) // 2  # the grid is symmetric about theta_2 = 0
    exact = density[half:].sum() / density.sum()
    return f"{first.mean():.3f} ± {error:.3f} of the draws, {exact:.3f} by quadrature"


def plot(samples: dict, log_p: np.ndarray, grid: tuple, title: str, path: str) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), width_ratios=(1, 1.3))
    theta_1, theta_2 = np.asarray(samples["theta_1"]), np.asarray(samples["theta_2"])
    some = (min(theta_1.size, 3000),)
    keep = random.choice(random.key(0), theta_1.size, some, replace=False)
    left.plot(
        theta_1.ravel()[keep],
        theta_2.ravel()[keep],
        ".",
        ms=3,
        alpha=0.4,
        label="MHBT draws",
    )
    axes = [np.linspace(*g) for g in grid]
    levels = log_p.max() - np.array([8, 5, 3, 1.5, 0.5])
    left.contour(
        *axes, log_p, levels=levels, colors="black", linestyles="solid", linewidths=1
    )
    left.plot([], [], "k-", lw=1, label="tempered posterior, all rows")
    modes = (THETA[0], THETA[0] + THETA[1]), (THETA[1], -THETA[1])
    left.plot(*modes, "r+", ms=12, mew=2, label="the two modes")
    left.set(xlabel=r"$\theta_1$", ylabel=r"$\theta_2$", title=title)
    left.legend(fontsize=8)
    right.plot(theta_2[0, :4000], lw=0.5)
    for mode in modes[1]:
        right.axhline(mode, color="red", lw=1)
    right.set(
        xlabel="draw", ylabel=r"$\theta_2$", title="One chain moves between the modes"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--rows", type=int, default=10**5)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--c-n", type=float, default=20.0)
    parser.add_argument("--chain-method", default="vectorized")
    parser.add_argument("--num-chains", type=int, default=4)
    parser.add_argument("--num-samples", type=int, default=5000)
    parser.add_argument("--smoke", action="store_true", help="seconds, on less data")
    parser.add_argument("--out", default="gaussian_mixture.png")
    args = parser.parse_args()
    if args.smoke:
        args.rows, args.batch_size, args.num_samples = 2000, 100, 100
    if args.chain_method == "parallel":
        numpyro.set_host_device_count(args.num_chains)

    x = mixture(*jnp.array(THETA)).sample(random.key(0), (args.rows,))
    mcmc = MCMC(
        MHBT(model, c_n=args.c_n, steps_per_draw=5),
        num_warmup=1000,
        num_samples=args.num_samples,
        num_chains=args.num_chains,
        chain_method=args.chain_method,
    )
    begin = time.perf_counter()
    fields = ("accept_prob", "noise_variance", "temperature")
    mcmc.run(random.key(1), x, args.batch_size, extra_fields=fields)
    seconds = time.perf_counter() - begin
    mcmc.print_summary()

    extra = mcmc.get_extra_fields()
    temperature = float(extra["temperature"][0])
    samples = mcmc.get_samples(group_by_chain=True)
    print(f"T = {temperature:g}, {seconds:.0f} s with compilation")
    print(f"acceptance {extra['accept_prob'].mean():.2f}")
    print(f"noise variance {extra['noise_variance'].mean():.2f}")
    print(f"moves between the modes: {count_visits(np.asarray(samples['theta_2']))}")

    grid = ((-3.5, 5.5, 90), (-6.0, 6.0, 90))
    log_p = np.asarray(tempered_log_posterior(x, temperature, grid))
    title = f"n = {args.rows:,}, batches of {args.batch_size:,}, T = {temperature:g}"
    plot(samples, log_p, grid, title, args.out)
    mass = compare_mass(np.asarray(samples["theta_2"]), log_p)
    print(f"mode with theta_2 > 0: {mass}")
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
