"""
Effective samples per second of the posterior itself: MHBT at T = 1 and its peers.

Logistic regression, d = 20. One chain each, all in compiled loops on the same data.
Each family first runs all its settings once; the fastest of them then alternates with
that of the other families, and the median over repeats counts, compilation and warm-up
apart. The error of each is shown beside its speed, against a Laplace approximation
(exact to a per mille at these n): a fast sampler of something else is no sampler.

Needs BlackJAX: ``pip install -e ".[bench]"``.

    python benchmarks/ess_per_second.py --rows 1000000
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
import time

import arviz as az
import blackjax
from blackjax.sgmcmc import gradients
import jax
from jax import lax, random
import jax.numpy as jnp
from models import logistic
import numpy as np
from numpyro.infer import HMC, HMCECS, NUTS, init_to_value
from numpyro.infer.mcmc import MCMCKernel

from numpyro_mhbt import MHBT, SGLD, Taylor, full_data

WARMUP = 1000


@dataclass
class Sampler:
    """``draw(state)`` returns the next state and draws, in one compiled call."""

    family: str
    name: str
    start: Callable[[], object]
    draw: Callable[[object], tuple[object, jax.Array]]


def laplace(x: jax.Array, y: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Mode and standard deviations of the posterior."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    w = np.zeros(x.shape[1])
    for _ in range(10):
        p = 1 / (1 + np.exp(-x @ w))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(w))
        w = w + np.linalg.solve(hessian, x.T @ (y - p) - w)
    return w, np.sqrt(np.diag(np.linalg.inv(hessian)))


def effective_draws(w: np.ndarray) -> float:
    """
    The smallest of bulk and tail effective sample size over the coefficients.

    The means alone would flatter samplers whose draws alternate around the mode: their
    mean is then known better than from independent draws, and their spread worse.
    """
    draws = az.convert_to_dataset({"w": w[None]})
    kinds = ("bulk", "tail")
    return min(float(az.ess(draws, method=kind)["w"].min()) for kind in kinds)


def numpyro_sampler(
    family: str,
    name: str,
    kernel: MCMCKernel,
    args: tuple,
    draws: int,
    warmup: int = WARMUP,
) -> Sampler:
    @partial(jax.jit, static_argnums=2)
    def loop(state: object, args: tuple, length: int) -> tuple[object, jax.Array]:
        def one(state: object, _: None) -> tuple[object, jax.Array]:
            state = kernel.sample(state, args, {})
            return state, state.z["w"]

        return lax.scan(one, state, None, length=length)

    def start() -> object:
        state = kernel.init(random.key(1), warmup, None, args, {})
        return loop(state, args, warmup)[0]

    return Sampler(family, name, start, lambda state: loop(state, args, draws))


def sgld_cv(
    args: tuple, m: int, mode: np.ndarray, step_size: float, draws: int, thin: int
) -> Sampler:
    n, center = len(args[1]), jnp.asarray(mode, jnp.float32)

    def log_prior(w: jax.Array) -> jax.Array:
        return -jnp.sum(w**2) / 2

    def log_likelihood(w: jax.Array, row: tuple) -> jax.Array:
        logit = row[0] @ w
        return row[1] * logit - jax.nn.softplus(logit)

    estimate = gradients.grad_estimator(log_prior, log_likelihood, n)
    sgld = blackjax.sgld(gradients.control_variates(estimate, center, args))

    @jax.jit
    def loop(carry: tuple, args: tuple) -> tuple[object, jax.Array]:
        def one(carry: tuple, _: None) -> tuple[tuple, None]:
            w, key = carry
            key, key_rows, key_step = random.split(key, 3)
            rows = random.randint(key_rows, (m,), 0, n)
            batch = (args[0][rows], args[1][rows])
            return (sgld.step(key_step, w, batch, step_size), key), None

        def kept(carry: tuple, _: None) -> tuple[tuple, jax.Array]:
            carry, _ = lax.scan(one, carry, None, length=thin)
            return carry, carry[0]

        return lax.scan(kept, carry, None, length=draws)

    def start() -> object:
        return loop((center, random.key(1)), args)[0]

    family, name = f"SGLD-CV, step {step_size * n:.2g}/n", f"m = {m}"
    return Sampler(family, name, start, lambda state: loop(state, args))


def make_samplers(n: int) -> tuple[list[Sampler], tuple]:
    problem = logistic(n)
    args = problem.args
    mode, sd = laplace(*args)
    center = {"w": jnp.asarray(mode, jnp.float32)}
    near = init_to_value(values=center)
    samplers = []
    for m in (30, 100, 300):
        model = partial(problem.model.func, m=m)
        for name, proposal in (("RSGLD", None), ("SGLD", SGLD())):
            kernel = MHBT(model, proposal, control_variate=Taylor(order=2))
            label = f"{name}, order 2, m = {m}"
            samplers.append(numpyro_sampler("MHBT", label, kernel, args, 20_000))
        for blocks in (1, 10):
            four_steps = {"trajectory_length": None, "num_steps": 4}
            for inner, options in ((NUTS, {}), (HMC, four_steps)):
                kernel = HMCECS(
                    inner(model, init_strategy=near, **options),
                    num_blocks=blocks,
                    proxy=HMCECS.taylor_proxy(center, degree=2),
                )
                label = f"{inner.__name__}, Taylor 2, m = {m}, {blocks} block(s)"
                samplers.append(numpyro_sampler("HMCECS", label, kernel, args, 1000))
        for step in (0.1, 0.3, 1.0):
            # ESS per second does not change with thinning as long as draws correlate.
            samplers.append(sgld_cv(args, m, mode, step / n, 4000, 5))
    nuts = NUTS(full_data(problem.model), init_strategy=near)
    draws = min(1000, max(20, int(5e7 / n)))
    label = "all rows"
    samplers.append(numpyro_sampler("NUTS", label, nuts, args, draws, 100))
    return samplers, (mode, sd)


@dataclass
class Run:
    """A sampler on its way."""

    sampler: Sampler
    setup: float
    state: object
    draws: list[np.ndarray]
    speed: list[float]

    @classmethod
    def begin(cls, sampler: Sampler) -> Run:
        begin = time.perf_counter()
        state = jax.block_until_ready(sampler.start())
        setup = time.perf_counter() - begin
        state = jax.block_until_ready(sampler.draw(state)[0])  # compiled now
        return cls(sampler, setup, state, [], [])

    def go_on(self) -> float:
        """Effective samples per second."""
        begin = time.perf_counter()
        self.state, w = jax.block_until_ready(self.sampler.draw(self.state))
        seconds = time.perf_counter() - begin
        self.draws.append(np.asarray(w, np.float64))
        self.speed.append(effective_draws(self.draws[-1]) / seconds)
        return self.speed[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--rows", type=int, default=10**6)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", help="families to run beside NUTS")
    args = parser.parse_args()
    samplers, (mode, sd) = make_samplers(args.rows)
    best: dict[str, Run] = {}
    for sampler in samplers:
        family = sampler.family
        if args.only and family != "NUTS" and family not in args.only:
            continue
        run = Run.begin(sampler)
        speed = run.go_on()
        print(f"{family}, {sampler.name}: {speed:.3g} per second", flush=True)
        if family not in best or speed > best[family].speed[0]:
            best[family] = run
        jax.clear_caches()  # else compiled programs exhaust the memory maps
    runs = list(best.values())
    for run in runs:
        run.state = jax.block_until_ready(run.sampler.draw(run.state)[0])
        run.draws, run.speed = [], []
    for _ in range(args.repeats):
        for run in runs:
            run.go_on()
    print("| sampler | ESS/s | ratio to NUTS | mean error, sd | sd error | set-up, s |")
    print("| --- " * 6 + "|")
    for run in runs:
        w = (np.concatenate(run.draws) - mode) / sd
        ratio = np.median(np.divide(run.speed, best["NUTS"].speed))
        name = f"{run.sampler.family}: {run.sampler.name}"
        print(
            f"| {name} | {np.median(run.speed):.3g} | "
            f"{ratio:.3g} | {np.abs(w.mean(0)).max():.3f} | "
            f"{np.abs(w.std(0) - 1).max():.3f} | {run.setup:.1f} |"
        )


if __name__ == "__main__":
    main()
