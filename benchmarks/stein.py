"""
Whether draws follow a posterior, by its gradient on all rows and no other sampler.

Draws of a density p that vanishes far out have E[g] = 0 and E[(θ - μ) g] = -1 in each
coordinate, g the derivative of log p (Stein). The first fails if draws are off, the
second if they are too wide or too narrow. Both are shown in standard errors, beside
what the largest of so many standard normal numbers is. See ``models.py`` for the data
folder.

    python benchmarks/stein.py --data DIR --only covtype_all
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
from models import REAL, SYNTHETIC, Problem
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.handlers import seed
from numpyro.infer import MCMC
from numpyro.infer.util import potential_energy, unconstrain_fn
from true_posterior import to_float64

from numpyro_mhbt import MHBT, Taylor, batch_report, full_data

CHAINS, DRAWS, KEPT = 4, 10_000, 250


def sample(problem: Problem) -> tuple[MCMC, dict[str, jax.Array]]:
    """A run, and some of its draws in unconstrained space, by chain."""
    mcmc = MCMC(
        MHBT(problem.model, control_variate=Taylor(order=2)),
        num_warmup=1000,
        num_samples=DRAWS,
        num_chains=CHAINS,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(0), *problem.args)
    draws = mcmc.get_samples(group_by_chain=True)
    some = jax.tree.map(lambda x: x[:, :: DRAWS // KEPT], draws)
    model = seed(problem.model, random.key(0))
    to_z = partial(unconstrain_fn, model, problem.args, {})
    return mcmc, jax.vmap(jax.vmap(to_z))(some)


def gradients(problem: Problem, z: dict[str, jax.Array]) -> tuple[np.ndarray, ...]:
    """Flat draws, and the gradient of the log-density of all rows at each."""
    with jax.enable_x64(True):
        z = jax.tree.map(to_float64, z)
        unravel = ravel_pytree(jax.tree.map(lambda x: x[0, 0], z))[1]
        flat = jax.vmap(jax.vmap(lambda z: ravel_pytree(z)[0]))(z)

        @jax.jit
        def slopes(points: jax.Array, args: tuple) -> jax.Array:
            def log_density(point: jax.Array) -> jax.Array:
                model: Callable[..., Any] = full_data(problem.model)
                return -potential_energy(model, args, {}, unravel(point))

            return lax.map(jax.grad(log_density), points)

        args = tuple(to_float64(x) for x in problem.args)
        found = [np.asarray(slopes(chain, args)) for chain in flat]
        return np.asarray(flat), np.stack(found)


def standard_errors(values: np.ndarray, expected: float) -> np.ndarray:
    """How far means are from what they should be."""
    error = values.std((0, 1)) / np.sqrt(effective_sample_size(values))
    return (values.mean((0, 1)) - expected) / error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    known = {**SYNTHETIC, **REAL}
    parser.add_argument("--data", type=Path, help="folder of the real data")
    parser.add_argument("--only", nargs="+", choices=known, default=["covtype_all"])
    args = parser.parse_args()
    if args.data is None and any(name in REAL for name in args.only):
        parser.error("--data is needed, or --only with synthetic data")
    for name in args.only:
        problem = known[name](args.data) if name in REAL else known[name]()
        mcmc, z = sample(problem)
        print(f"{name}\n{batch_report(mcmc)}")
        flat, grad = gradients(problem, z)
        dim = flat.shape[-1]
        normal = np.abs(np.random.default_rng(0).standard_normal((10_000, dim)))
        largest = np.quantile(normal.max(axis=1), 0.95)
        location = standard_errors(grad, 0.0)
        spread = standard_errors((flat - flat.mean((0, 1))) * grad, -1.0)
        print(f"{dim} coordinates; 95 of 100 times the largest is below {largest:.1f}:")
        for what, found in {"location": location, "spread": spread}.items():
            size, mean = np.abs(found).max(), np.sqrt(np.mean(found**2))
            print(
                f"  {what}: {size:.1f} standard errors at most, {mean:.2f} in the mean"
            )


if __name__ == "__main__":
    main()
