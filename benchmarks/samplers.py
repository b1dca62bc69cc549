"""
The systems side by side: MHBT, and what else samples a posterior of many rows.

Each is a :class:`Sampler`: a start (warm-up included) and a compiled loop of a few
draws. All see the same NumPyro model and the same data. Peers are given what they ask
for: the mode as reference or start, and steps in units of the narrowest direction of
the posterior.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
import time
from typing import Any

import blackjax
from blackjax.sgmcmc import gradients
import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from models import Problem
import numpy as np
import numpyro.distributions as dist
from numpyro.handlers import seed, substitute
from numpyro.infer import HMC, HMCECS, NUTS, init_to_value
from numpyro.infer.mcmc import MCMCKernel
from numpyro.infer.util import constrain_fn, potential_energy
from reference import Reference
from tuna import Tuna, logistic_bounds, make_step, student_bounds

from numpyro_mhbt import MHBT, SGLD, RandomWalk, Taylor, full_data
from numpyro_mhbt.plates import draw_rows

WARMUP = 1000
NUTS_SECONDS = 120
"""For its draws, and half as many for warm-up, where a gradient takes long."""
_CALLS, _TREE = 13, 15
"""How often the suite asks for draws that take long; and gradients of a tree."""


@dataclass
class Sampler:
    """``draw(state)`` returns the next state and draws, in one compiled call."""

    family: str
    name: str
    start: Callable[[], Any]
    draw: Callable[[Any], tuple[Any, jax.Array]]


def every_sampler(problem: Problem, exact: Reference, effort: int) -> Iterator[Sampler]:
    """
    :param effort: 0 for one setting of each family, 1 for the usual ones, 2 for all
        that are worth a try, 3 for those that were fastest with many rows, of which
        each start takes long.
    """
    yield from mhbt(problem, effort)
    yield from hmcecs(problem, exact, effort)
    yield from stochastic_gradient(problem, exact, effort)
    if problem.n <= 10**6:  # of more, the float32 of its sums cannot tell rows apart
        yield from tuna(problem, exact, effort)
    yield from nuts(problem, exact)


def of_kernel(
    family: str,
    name: str,
    kernel: MCMCKernel,
    problem: Problem,
    draws: int,
    warmup: int = WARMUP,
) -> Sampler:
    """A kernel of NumPyro; draws are unconstrained, in the order of their names."""

    @partial(jax.jit, static_argnums=2)
    def loop(state: Any, args: tuple, length: int) -> tuple[Any, jax.Array]:
        def one(state: Any, _: None) -> tuple[Any, jax.Array]:
            state = kernel.sample(state, args, {})
            z = state.hmc_state.z if hasattr(state, "hmc_state") else state.z
            return state, ravel_pytree(z)[0]

        return lax.scan(one, state, None, length=length)

    def start() -> Any:
        state = kernel.init(random.key(1), warmup, None, problem.args, {})
        return loop(state, problem.args, warmup)[0]

    return Sampler(family, name, start, lambda state: loop(state, problem.args, draws))


def with_batch(problem: Problem, m: int) -> Problem:
    return Problem(problem.name, partial(problem.model.func, m=m), problem.args)


def near(problem: Problem, exact: Reference) -> Callable:
    return init_to_value(values=constrained_mode(problem, exact))


def constrained_mode(problem: Problem, exact: Reference) -> dict[str, jax.Array]:
    z = exact.unravel(jnp.asarray(exact.mode, jnp.float32))
    model = seed(full_data(problem.model), random.key(0))
    return constrain_fn(model, problem.args, {}, z)


def nuts(problem: Problem, exact: Reference) -> Iterator[Sampler]:
    """
    On all rows; of very many it makes as few draws as its time allows, or none.

    A compiled loop cannot be stopped: its length is bounded beforehand, by what a tree
    takes, and trees are bounded, too: float32 hardly tells energies of ten million rows
    apart, for which steps shrink and trees would grow.
    """
    draws, warmup, depth, name = 10, 100, 10, "all rows"
    if problem.n > 10**6:
        trees = NUTS_SECONDS / (_TREE * seconds_of_gradient(problem, exact))
        draws, warmup = min(int(trees / _CALLS), draws), min(int(trees / 4), warmup)
        if draws < 2:
            return
        depth = int(np.log2(_TREE + 1))
        name = f"all rows, warm-up of {warmup}, {_TREE} gradients at most"
    start = near(problem, exact)
    kernel = NUTS(full_data(problem.model), init_strategy=start, max_tree_depth=depth)
    yield of_kernel("NUTS", name, kernel, problem, draws, warmup)


def seconds_of_gradient(problem: Problem, exact: Reference) -> float:
    """On all rows, after compilation."""
    model = full_data(problem.model)

    @jax.jit
    def gradient(z: dict, args: tuple) -> dict:
        return jax.grad(lambda z: potential_energy(model, args, {}, z))(z)

    z = exact.unravel(jnp.asarray(exact.mode, jnp.float32))
    for _ in range(2):
        begin = time.perf_counter()
        jax.block_until_ready(gradient(z, problem.args))
        seconds = time.perf_counter() - begin
    return seconds


def mhbt(problem: Problem, effort: int) -> Iterator[Sampler]:
    settings: list[tuple] = [
        ("SGLD", SGLD(), 100),
        ("SGLD", SGLD(), 1000),
        ("RSGLD", None, 1000),
        ("RSGLD", None, 100),
        ("random walk", RandomWalk(), 1000),
    ]
    for i in ((0,), range(3), range(5), (0, 3))[effort]:
        name, proposal, m = settings[i]
        at = with_batch(problem, m)
        kernel = MHBT(at.model, proposal, control_variate=Taylor(order=2))
        yield of_kernel("MHBT", f"{name}, order 2, m = {m}", kernel, at, 2000)


def hmcecs(problem: Problem, exact: Reference, effort: int) -> Iterator[Sampler]:
    center = constrained_mode(problem, exact)
    four_steps = {"trajectory_length": None, "num_steps": 4}
    settings: list[tuple] = [
        (HMC, four_steps, 2, 100, 10),
        (NUTS, {}, 2, 100, 10),
        (HMC, four_steps, None, 1000, 10),
        (HMC, four_steps, 2, 30, 10),
        (HMC, four_steps, 2, 30, 1),
        (HMC, four_steps, 1, 100, 10),
    ]
    for i in ((0,), range(3), range(6), (0, 2, 3, 5))[effort]:
        inner, options, degree, m, blocks = settings[i]
        at = with_batch(problem, m)
        kernel = HMCECS(
            inner(at.model, init_strategy=init_to_value(values=center), **options),
            num_blocks=blocks,
            proxy=degree and HMCECS.taylor_proxy(center, degree=degree),
        )
        proxy = f"Taylor {degree}" if degree else "no proxy"
        name = f"{inner.__name__}, {proxy}, m = {m}, {blocks} block(s)"
        family = "HMCECS" if degree else "HMCECS without proxy"
        yield of_kernel(family, name, kernel, at, 200)


def stochastic_gradient(
    problem: Problem, exact: Reference, effort: int
) -> Iterator[Sampler]:
    """BlackJAX's SGLD and SGHMC, with and without control variates."""
    m, n = 100, problem.n
    narrow = float(np.linalg.eigvalsh(exact.covariance)[0])
    center = exact.unravel(jnp.asarray(exact.mode, jnp.float32))

    # The data go with the rows: inside the compiled program they would be copied.
    def gradient(z: dict, batch: tuple[tuple, jax.Array]) -> dict:
        args, rows = batch
        model = with_batch(problem, m).model
        model = (
            full_data(model) if len(rows) == n else substitute(model, data={"N": rows})
        )
        return jax.grad(lambda z: -potential_energy(model, args, {}, z))(z)

    with_center = gradients.control_variates(
        gradient, center, (problem.args, jnp.arange(n))
    )

    def sampler(
        family: str, step: Callable, step_size: float, unit: float, thin: int
    ) -> Sampler:
        @jax.jit
        def loop(args: tuple, carry: tuple) -> tuple[Any, jax.Array]:
            def one(carry: tuple, _: None) -> tuple[tuple, None]:
                z, key, rows = carry
                key, key_rows, key_step = random.split(key, 3)
                z = step(key_step, z, (args, rows), step_size * unit)
                return (z, key, draw_rows(key_rows, n, m)), None

            def kept(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
                carry, _ = lax.scan(one, carry, None, length=thin)
                return carry, ravel_pytree(carry[0])[0]

            return lax.scan(kept, carry, None, length=1000)

        begin = center, random.key(1), jnp.arange(m)
        name = f"step {step_size:g}, m = {m}"
        draw = partial(loop, problem.args)
        return Sampler(family, name, partial(first_of, draw, begin), draw)

    for step_size in (0.1, 0.03, 0.3)[: 3 if effort else 1]:
        langevin = blackjax.sgld(with_center)
        yield sampler("SGLD-CV", langevin.step, step_size, narrow, 5)
    yield sampler("SGLD", blackjax.sgld(gradient).step, 0.1, narrow, 5)
    for step_size in (0.1, 0.3) if effort else ():
        hamiltonian = blackjax.sghmc(with_center, 10, alpha=narrow**-0.5)
        yield sampler("SGHMC-CV", hamiltonian.step, step_size, narrow**0.5, 1)


def first_of(fn: Callable, *args: Any) -> Any:
    return fn(*args)[0]


def tuna(problem: Problem, exact: Reference, effort: int) -> Iterator[Sampler]:
    """TunaMH, where bounds are known."""

    def logistic(w: jax.Array, rows: tuple) -> jax.Array:
        logit = rows[0] @ w
        return rows[1] * logit - jax.nn.softplus(logit)

    def student(w: jax.Array, rows: tuple) -> jax.Array:
        return dist.StudentT(4.0, rows[0] @ w).log_prob(rows[1])

    known = {
        "logistic_model": (logistic, logistic_bounds),
        "student_model": (student, partial(student_bounds, dof=4.0)),
    }
    kind = problem.model.func.__name__
    if kind not in known:
        return
    log_likelihood, bounds = known[kind]
    root = jnp.asarray(np.linalg.cholesky(exact.covariance), jnp.float32)
    settings = ((0.1, 0.01), (0.05, 0.01), (0.1, 0.003))
    for length, chi in settings[: 3 if effort else 1]:
        walk = Tuna(
            lambda w: -jnp.sum(w**2) / 2,
            log_likelihood,
            problem.args,
            bounds(problem.args[0]),
            length * root,
            chi,
        )
        step = make_step(walk)

        @jax.jit
        def loop(carry: tuple, step: Callable = step) -> tuple[Any, jax.Array]:
            def one(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
                w, key = carry
                key, key_step = random.split(key)
                w = step(key_step, w)[0]
                return (w, key), w

            return lax.scan(one, carry, None, length=200)

        begin = jnp.asarray(exact.mode, jnp.float32), random.key(1)
        name = f"moves of {length:g} sd, χ = {chi:g}"
        yield Sampler("TunaMH", name, partial(first_of, loop, begin), loop)
