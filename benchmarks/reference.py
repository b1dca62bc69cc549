"""
The moments of a posterior from all rows, by importance sampling.

Draws of the Gaussian approximation at the mode are weighted with the posterior density
of all rows in float64. The draws come in pairs around the mode and have its covariance
exactly, so that only what the posterior departs from a Gaussian carries Monte Carlo
error. The Pareto shape k tells whether the weights can be trusted. Rows are passed over
in chunks, which bounds the memory.

The hierarchical regression is too far from a Gaussian for that. Its rows enter by a few
sums only, on which NUTS is quick.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import arviz as az
import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from models import GROUPS, Problem, normal
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.handlers import substitute
from numpyro.infer import MCMC, NUTS, init_to_feasible
from numpyro.infer.util import initialize_model, potential_energy
from true_posterior import newton

CHUNK, POINTS = 4096, 100  # rows, and draws, at once


class Reference(NamedTuple):
    """In unconstrained space, flat."""

    mean: np.ndarray
    sd: np.ndarray
    mode: np.ndarray
    covariance: np.ndarray
    unravel: Callable
    pareto_k: float
    effective: float
    """How many independent draws it is worth, apart from the pairing."""


def find_reference(problem: Problem) -> Reference:
    if problem.name == "hierarchical":
        return by_sums(*problem.args)
    return by_importance(problem)


def by_importance(problem: Problem) -> Reference:
    draws = int(np.clip(4e8 / problem.n, 500, 4000)) // 2 * 2
    with jax.enable_x64(True):
        mode, covariance, unravel = find_mode(problem)
        root = jnp.linalg.cholesky(covariance)
        half = random.normal(random.key(1), (draws // 2, len(mode)))
        unit = jnp.concatenate([half, -half])
        unit = unit @ jnp.linalg.inv(jnp.linalg.cholesky(unit.T @ unit / draws)).T
        z = mode + unit @ root.T

        def at_draws(potential: Callable, z: jax.Array) -> jax.Array:
            return lax.map(lambda z: potential(unravel(z)), z, batch_size=POINTS)

        potentials = on_all_rows(problem, at_draws)(z)
        log_weights = 0.5 * jnp.sum(unit**2, 1) - potentials
        smoothed, k = az.psislw(np.asarray(log_weights))
        z = np.asarray(z)
    weights = np.exp(np.asarray(smoothed))
    weights /= weights.sum()
    mean = weights @ z
    sd = np.sqrt(weights @ (z - mean) ** 2)
    return Reference(
        mean,
        sd,
        np.asarray(mode),
        np.asarray(covariance),
        back_from_flat(unravel(mode)),
        float(k),
        float(1 / np.sum(weights**2)),
    )


def find_mode(problem: Problem) -> tuple[jax.Array, jax.Array, Callable]:
    """In the unconstrained space: the mode, the covariance there, and its shape."""
    info = initialize_model(
        random.key(0),
        problem.model,  # of a batch, as only names and shapes count here
        init_strategy=init_to_feasible,
        model_args=problem.args,
    )
    start, unravel = ravel_pytree(info.param_info.z)

    def value(potential: Callable, z: jax.Array) -> jax.Array:
        return potential(unravel(z))

    def derivatives(potential: Callable, z: jax.Array) -> tuple[jax.Array, jax.Array]:
        flat = partial(value, potential)
        return jax.grad(flat)(z), jax.hessian(flat)(z)

    whole = partial(on_all_rows, problem)
    return *newton(whole(value), whole(derivatives), start), unravel


def on_all_rows(problem: Problem, linear: Callable) -> Callable:
    """
    ``linear(potential, z)`` for the potential of all rows, as a function of z.

    It passes from chunk to chunk: derivatives of ten million rows at once would not fit
    into memory. The model counts the m rows of a chunk n/m times, so that the mean over
    chunks, weighted by m, is of all rows, for whatever is linear in the potential.
    """
    n = problem.n
    first_size = n % CHUNK or CHUNK

    def of_chunk(args: tuple, z: jax.Array, start: int | jax.Array, m: int) -> Any:
        model = partial(problem.model.func, m=m)
        on_chunk = substitute(model, data={"N": start + jnp.arange(m)})
        found = linear(partial(potential_energy, on_chunk, args, {}), z)
        return jax.tree.map(lambda x: m / n * x, found)

    @jax.jit
    def of_all(args: tuple, z: jax.Array) -> Any:
        def more(total: Any, start: jax.Array) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, of_chunk(args, z, start, CHUNK)), None

        begin = of_chunk(args, z, 0, first_size)
        return lax.scan(more, begin, jnp.arange(first_size, n, CHUNK))[0]

    return partial(of_all, problem.args)


def back_from_flat(z: dict) -> Callable:
    """From a flat vector to values of these names and shapes, in float32."""
    template = {name: jnp.zeros(np.shape(x), jnp.float32) for name, x in z.items()}
    return ravel_pytree(template)[1]


def by_sums(x: jax.Array, group: jax.Array, y: jax.Array) -> Reference:
    """Of ``hierarchical_model``."""
    design = np.concatenate([x, np.eye(GROUPS)[np.asarray(group)]], 1, dtype=float)
    response = np.asarray(y, float)
    products, slopes = design.T @ design, design.T @ response
    square, n = response @ response, len(response)

    def model() -> None:
        w = normal("w", x.shape[1])
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        b = jnp.concatenate([w, tau * normal("effects", GROUPS)])
        misfit = square - 2 * b @ slopes + b @ products @ b
        numpyro.factor("y", -n * jnp.log(sigma) - misfit / (2 * sigma**2))

    with jax.enable_x64(True):
        kernel = NUTS(model, dense_mass=True, target_accept_prob=0.95)
        mcmc = MCMC(
            kernel,
            num_warmup=2000,
            num_samples=5000,
            num_chains=4,
            chain_method="vectorized",
            progress_bar=False,
        )
        mcmc.run(random.key(0))
        z = {k: np.asarray(v) for k, v in mcmc.get_samples().items()}
    z |= {name: np.log(z[name]) for name in ("sigma", "tau")}
    flat = np.concatenate([z[k].reshape(len(z[k]), -1) for k in sorted(z)], 1)
    mean, covariance = flat.mean(0), np.cov(flat.T)
    effective = float(effective_sample_size(flat.reshape(4, 5000, -1)).min())
    first = {name: value[0] for name, value in z.items()}
    sd = np.sqrt(np.diag(covariance))
    back = back_from_flat(first)
    return Reference(mean, sd, mean, covariance, back, np.nan, effective)
