"""
Draws from mini-batches at temperature 1 beside those of NUTS on all rows.

NUTS runs in float64, from an overdispersed start around the mode and with the Hessian
there as mass matrix, until mean and standard deviation are each worth 4000 independent
draws: its own error is then 0.016 standard deviations and 1.1% by coordinate, the
largest of twenty some two or three times as much. Its moments are kept in the cache
folder. See ``models.py`` for the data folder.

    python benchmarks/true_posterior.py --data DIR --cache DIR
    python benchmarks/true_posterior.py --data DIR --cache DIR --only logistic
    python benchmarks/true_posterior.py --data DIR --cache DIR --reference-only
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
import time

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from models import REAL, SYNTHETIC, Problem
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC, NUTS, init_to_feasible
from numpyro.infer.util import initialize_model

from numpyro_mhbt import MHBT, Taylor, full_data

NAMES = (
    "logistic",
    "covtype_logistic",
    "flights_poisson",
    "flights_linear",
    "flights_robust",
)
REFERENCE_ESS, REFERENCE_CHAINS = 4000, 2
COLUMNS = (
    "model",
    "n",
    "m",
    "d",
    "temperature",
    "largest mean difference, sd",
    "largest sd difference, %",
    "min ESS",
    "max R-hat",
    "acceptance",
)


def flat_draws(mcmc: MCMC) -> np.ndarray:
    """Chains, draws and the coordinates of all sites in the order of their names."""
    samples = mcmc.get_samples(group_by_chain=True)
    parts = [np.asarray(samples[name], np.float64) for name in sorted(samples)]
    return np.concatenate([p.reshape(*p.shape[:2], -1) for p in parts], axis=2)


def moments(draws: np.ndarray) -> dict[str, np.ndarray]:
    """Mean and sd by coordinate, and how many independent draws each is worth."""
    mean, sd = draws.mean((0, 1)), draws.std((0, 1))
    return {
        "mean": mean,
        "sd": sd,
        "ess": effective_sample_size(draws),
        "ess_sd": effective_sample_size((draws - mean) ** 2),
        "r_hat": split_gelman_rubin(draws),
    }


def newton(
    potential: Callable, derivatives: Callable, z: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """
    The minimum of a potential and the inverse of its Hessian there.

    :param derivatives: the first and the second at a point.
    """
    for _ in range(100):
        grad, hessian = derivatives(z)
        curvature, axes = jnp.linalg.eigh(hessian)
        inverse = (axes / jnp.abs(curvature)) @ axes.T
        step, value = inverse @ grad, potential(z)
        if grad @ step < 1e-6:
            return z, inverse
        while not potential(z - step) < value:  # true of NaN, too
            step = step / 2
        z = z - step
    raise RuntimeError("No mode was found.")


def find_mode(problem: Problem, args: tuple) -> tuple[jax.Array, jax.Array, Callable]:
    """In the unconstrained space: the mode, the covariance there, and its shape."""
    info = initialize_model(
        random.key(0),
        full_data(problem.model),
        init_strategy=init_to_feasible,
        dynamic_args=True,
        model_args=args,
    )
    start, unravel = ravel_pytree(info.param_info.z)
    of_tree = info.potential_fn(*args)

    def potential(z: jax.Array) -> jax.Array:
        return of_tree(unravel(z))

    def derivatives(z: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jax.grad(potential)(z), jax.hessian(potential)(z)

    mode, covariance = newton(jax.jit(potential), jax.jit(derivatives), start)
    return mode, covariance, unravel


def to_float64(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def run_nuts(problem: Problem) -> dict[str, np.ndarray]:
    """Moments of the posterior by NUTS on all rows."""
    args = tuple(to_float64(a) for a in problem.args)
    mode, covariance, unravel = find_mode(problem, args)
    noise = random.normal(random.key(1), (REFERENCE_CHAINS, len(mode)))
    starts = mode + 2 * noise @ jnp.linalg.cholesky(covariance).T
    kernel = NUTS(
        full_data(problem.model),
        dense_mass=True,
        inverse_mass_matrix=covariance,
        adapt_mass_matrix=False,
        max_tree_depth=2,  # longer ones turn back, which tells nothing of the sd
    )
    mcmc = MCMC(
        kernel,
        num_warmup=200,
        num_samples=500,
        num_chains=REFERENCE_CHAINS,
        chain_method="sequential",
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.warmup(random.key(2), *args, init_params=jax.vmap(unravel)(starts))
    draws, found = [], {}
    while not found or min(found["ess"].min(), found["ess_sd"].min()) < REFERENCE_ESS:
        mcmc.run(mcmc.post_warmup_state.rng_key, *args)
        mcmc.post_warmup_state = mcmc.last_state
        draws.append(flat_draws(mcmc))
        found = moments(np.concatenate(draws, axis=1))
    return found


def reference(problem: Problem, cache: Path) -> dict[str, np.ndarray]:
    """Moments of the posterior, from the cache if they are there."""
    path = cache / f"{problem.name}.npz"
    if not path.exists():
        begin = time.perf_counter()
        with jax.enable_x64(True):
            found = run_nuts(problem)
        cache.mkdir(parents=True, exist_ok=True)
        np.savez(path, seconds=time.perf_counter() - begin, **found)
    return dict(np.load(path))


def run_ours(problem: Problem) -> MCMC:
    kernel = MHBT(problem.model, control_variate=Taylor(order=2))
    mcmc = MCMC(
        kernel,
        num_warmup=2000,
        num_samples=20000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    fields = "accept_prob", "temperature"
    mcmc.run(random.key(3), *problem.args, extra_fields=fields)
    return mcmc


def compare(problem: Problem, exact: dict[str, np.ndarray]) -> list[str]:
    """A row of the table."""
    mcmc = run_ours(problem)
    ours, extra = moments(flat_draws(mcmc)), mcmc.get_extra_fields()
    mean_error = np.abs(ours["mean"] - exact["mean"]) / exact["sd"]
    sd_error = np.abs(ours["sd"] / exact["sd"] - 1)
    return [
        problem.name,
        f"{problem.n}",
        f"{problem.m}",
        f"{len(mean_error)}",
        f"{extra['temperature'][-1]:g}",
        f"{mean_error.max():.3f}",
        f"{100 * sd_error.max():.1f}",
        f"{ours['ess'].min():.0f}",
        f"{ours['r_hat'].max():.3f}",
        f"{extra['accept_prob'].mean():.2f}",
    ]


def report_reference(problem: Problem, exact: dict[str, np.ndarray]) -> list[str]:
    return [
        problem.name,
        f"{problem.n}",
        f"{len(exact['mean'])}",
        f"{exact['ess'].min():.0f}",
        f"{exact['ess_sd'].min():.0f}",
        f"{exact['r_hat'].max():.4f}",
        f"{exact['seconds']:.0f}",
    ]


def print_row(cells: list[str] | tuple[str, ...]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--data", type=Path, help="folder of the real data")
    parser.add_argument("--cache", type=Path, required=True, help="folder for NUTS")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES)
    parser.add_argument("--reference-only", action="store_true", help="run NUTS only")
    args = parser.parse_args()
    if args.data is None and any(name in REAL for name in args.only):
        parser.error("--data is needed, or --only with synthetic data")
    header = COLUMNS
    if args.reference_only:
        header = "model", "n", "d", "ESS", "ESS of sd", "R-hat", "seconds"
    print_row(header)
    print_row(["---"] * len(header))
    for name in args.only:
        problem = REAL[name](args.data) if name in REAL else SYNTHETIC[name]()
        exact = reference(problem, args.cache)
        row = report_reference if args.reference_only else compare
        print_row(row(problem, exact))


if __name__ == "__main__":
    main()
