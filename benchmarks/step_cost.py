"""
What a step costs, as a ratio to a bare ``value_and_grad`` of the same log-density.

Logistic regression, d = 20, m = 1000. The bare step draws its rows with ``randint``
and takes one gradient step; ours does all of Algorithm 1. Both run in one compiled
loop, alternating, and the median of the ratios counts.

    python benchmarks/step_cost.py            # n = 10^5
    python benchmarks/step_cost.py --growth   # n = 10^4 to 10^7
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
import time

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import substitute
from numpyro.infer.util import potential_energy

from numpyro_mhbt import MHBT, RSGLD, RandomWalk, Taylor

DIM, BATCH, STEPS = 20, 1000, 2000
KERNELS = {
    "RSGLD, no control variate": (RSGLD(), None),
    "RSGLD, order 0": (RSGLD(), Taylor(order=0)),
    "RandomWalk, no control variate": (RandomWalk(0.1), None),
    "RandomWalk, order 0": (RandomWalk(0.1), Taylor(order=0)),
}


def model(x: jax.Array, y: jax.Array) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("N", len(x), subsample_size=BATCH) as rows:
        numpyro.sample("y", dist.Bernoulli(logits=x[rows] @ w), obs=y[rows])


def make_data(n: int) -> tuple[jax.Array, jax.Array]:
    key_x, key_w, key_y = random.split(random.key(0), 3)
    x = random.normal(key_x, (n, DIM))
    w = 0.3 * random.normal(key_w, (DIM,))
    return x, random.bernoulli(key_y, jax.nn.sigmoid(x @ w)).astype(jnp.float32)


def bare_loop(data: tuple) -> tuple[Callable, tuple]:
    n = len(data[1])

    def body(carry: tuple, _: None) -> tuple:
        w, key = carry
        key, key_rows = random.split(key)
        rows = random.randint(key_rows, (BATCH,), 0, n)
        on_batch = substitute(model, data={"N": rows})
        potential = partial(potential_energy, on_batch, data, {})
        value, grad = jax.value_and_grad(lambda w: potential({"w": w}))(w)
        return (w - 1e-9 * value * grad, key), None

    run = jax.jit(lambda carry: lax.scan(body, carry, None, length=STEPS)[0])
    return run, (jnp.zeros(DIM), random.key(1))


def kernel_loop(data: tuple, proposal: object, control: Taylor | None) -> tuple:
    kernel = MHBT(model, proposal, control_variate=control)
    state = kernel.init(random.key(1), 0, None, data, {})
    run = jax.jit(
        lambda state: lax.scan(
            lambda s, _: (kernel.sample(s, data, {}), None), state, None, length=STEPS
        )[0]
    )
    return run, state


def seconds(loop: tuple[Callable, object]) -> float:
    run, start = loop
    begin = time.perf_counter()
    jax.block_until_ready(run(start))
    return time.perf_counter() - begin


def measure(n: int, repeats: int) -> tuple[float, dict[str, float]]:
    """Microseconds of the bare step, and each kernel's median ratio to it."""
    data = make_data(n)
    bare = bare_loop(data)
    loops = {name: kernel_loop(data, *spec) for name, spec in KERNELS.items()}
    for loop in (bare, *loops.values()):
        seconds(loop)  # compile
    times: dict[str, list[float]] = {name: [] for name in ("bare", *loops)}
    for _ in range(repeats):
        times["bare"].append(seconds(bare))
        for name, loop in loops.items():
            times[name].append(seconds(loop))
    base = np.array(times.pop("bare"))
    ratios = {name: float(np.median(np.array(t) / base)) for name, t in times.items()}
    return float(np.median(base)) / STEPS * 1e6, ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--growth", action="store_true", help="n = 10^4 to 10^7")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    sizes = [10**4, 10**5, 10**6, 10**7] if args.growth else [10**5]
    print(f"| n | bare step (µs) | {' | '.join(KERNELS)} |")
    print("| --- " * (len(KERNELS) + 2) + "|")
    for n in sizes:
        bare, ratios = measure(n, args.repeats)
        cells = " | ".join(f"{ratio:.2f}" for ratio in ratios.values())
        print(f"| {n:.0e} | {bare:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
