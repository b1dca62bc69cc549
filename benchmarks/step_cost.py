"""
What a step costs, as a ratio to a bare ``value_and_grad`` of the same log-density.

Logistic regression, d = 20, m = 1000. The bare step draws its rows with ``randint``
and takes one gradient step; ours does all of Algorithm 1. All run in compiled loops,
alternating, and the median of the ratios counts. ``randint`` costs more than our draw
without replacement, so the bare step is also shown with our draw (and our keys, whose
bits JAX makes faster), and a step of optax's SGD with it, too.

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
import optax

from numpyro_mhbt import MHBT, RSGLD, MHBTState, RandomWalk, Taylor
from numpyro_mhbt.keys import quick
from numpyro_mhbt.plates import draw_rows

DIM, BATCH, STEPS = 20, 1000, 2000
KERNELS = {
    "RSGLD, no control variate": (RSGLD(), None),
    "RSGLD, order 0": (RSGLD(), Taylor(order=0)),
    "RSGLD, order 1": (RSGLD(), Taylor(order=1)),
    "RSGLD, order 2": (RSGLD(), Taylor(order=2)),
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
    return x, random.bernoulli(key_y, jax.nn.sigmoid(x @ w)).astype(x.dtype)


def randint_rows(key: jax.Array, n: int) -> jax.Array:
    return random.randint(key, (BATCH,), 0, n)


def our_rows(key: jax.Array, n: int) -> jax.Array:
    return draw_rows(key, n, BATCH)


def bare_loop(
    data: tuple,
    draw: Callable[[jax.Array, int], jax.Array],
    rng_key: jax.Array,
) -> tuple:
    def body(data: tuple, carry: tuple, _: None) -> tuple:
        # The rows of the next step are drawn here and carried over: drawn where they
        # are used, XLA would fuse the draw into the gather and repeat it by column.
        w, rows, key = carry
        on_batch = substitute(model, data={"N": rows})
        potential = partial(potential_energy, on_batch, data, {})
        value, grad = jax.value_and_grad(lambda w: potential({"w": w}))(w)
        key, key_rows = random.split(key)
        return (w - 1e-9 * value * grad, draw(key_rows, len(data[1])), key), None

    def run(carry: tuple, data: tuple) -> tuple:
        return lax.scan(partial(body, data), carry, None, length=STEPS)[0]

    rows = draw(rng_key, len(data[1]))
    return jax.jit(run), ((jnp.zeros(DIM), rows, rng_key), data)


def sgd_loop(data: tuple) -> tuple:
    optimizer = optax.sgd(1e-9)

    def body(data: tuple, carry: tuple, _: None) -> tuple:
        w, state, rows, key = carry
        on_batch = substitute(model, data={"N": rows})
        grad = jax.grad(lambda w: potential_energy(on_batch, data, {}, {"w": w}))(w)
        updates, state = optimizer.update(grad, state, w)
        key, key_rows = random.split(key)
        rows = our_rows(key_rows, len(data[1]))
        return (optax.apply_updates(w, updates), state, rows, key), None

    def run(carry: tuple, data: tuple) -> tuple:
        return lax.scan(partial(body, data), carry, None, length=STEPS)[0]

    w = jnp.zeros(DIM)
    start = w, optimizer.init(w), jnp.zeros(BATCH, jnp.int32), quick(random.key(1))[0]
    return jax.jit(run), (start, data)


def many_gradients(data: tuple, k: int, own: bool, steps: int) -> tuple:
    """``steps`` gradients of k chains, each on its own batch or all on the same."""

    def gradient(data: tuple, w: jax.Array, rows: jax.Array) -> jax.Array:
        on_batch = substitute(model, data={"N": rows})
        return jax.grad(lambda w: potential_energy(on_batch, data, {}, {"w": w}))(w)

    def run(carry: tuple, data: tuple) -> tuple:
        def body(carry: tuple, _: None) -> tuple:
            w, rows, key = carry
            over = (0, 0) if own else (0, None)
            grads = jax.vmap(partial(gradient, data), over)(w, rows)
            key, *keys = random.split(key, 1 + (k if own else 1))
            draw = partial(our_rows, n=len(data[1]))
            rows = jax.vmap(draw)(jnp.stack(keys)) if own else draw(keys[0])
            return (w - 1e-9 * grads, rows, key), None

        return lax.scan(body, carry, None, length=steps)[0]

    rows = jnp.zeros((k, BATCH) if own else BATCH, jnp.int32)
    start = jnp.zeros((k, DIM)), rows, quick(random.key(1))[0]
    return jax.jit(run), (start, data)


def kernel_loop(data: tuple, proposal: object, control: Taylor | None) -> tuple:
    return loop_of(MHBT(model, proposal, control_variate=control), data, STEPS)


def loop_of(kernel: MHBT, data: tuple, steps: int, chains: int | None = None) -> tuple:
    """Of one chain, or of vectorised ones."""
    key = random.key(1)
    keys = key if chains is None else random.split(key, chains)
    state = kernel.init(keys, 0, None, data, {})

    def run(state: MHBTState, data: tuple) -> MHBTState:
        return lax.scan(
            lambda s, _: (kernel.sample(s, data, {}), None), state, None, length=steps
        )[0]

    return jax.jit(run), (state, data)


def seconds(loop: tuple[Callable, tuple]) -> float:
    run, args = loop
    begin = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - begin


def measure(n: int, repeats: int) -> tuple[float, dict[str, float]]:
    """Microseconds of the bare step, and the median ratios to it."""
    data, key = make_data(n), random.key(1)
    loops = {
        "bare": bare_loop(data, randint_rows, key),
        "bare, our rows": bare_loop(data, our_rows, quick(key)[0]),
        "optax SGD, our rows": sgd_loop(data),
    }
    loops |= {name: kernel_loop(data, *spec) for name, spec in KERNELS.items()}
    for loop in loops.values():
        seconds(loop)  # compile
    times = np.array(
        [[seconds(loop) for loop in loops.values()] for _ in range(repeats)]
    )
    ratios = np.median(times / times[:, :1], axis=0)
    bare = float(np.median(times[:, 0])) / STEPS * 1e6
    return bare, dict(zip(loops, ratios.tolist(), strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--growth", action="store_true", help="n = 10^4 to 10^7")
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args()
    sizes = [10**4, 10**5, 10**6, 10**7] if args.growth else [10**5]
    for n in sizes:
        bare, ratios = measure(n, args.repeats)
        if n == sizes[0]:
            print(f"| n | bare step, µs | {' | '.join(list(ratios)[1:])} |")
            print("| --- " * (len(ratios) + 1) + "|")
        cells = " | ".join(f"{ratio:.2f}" for ratio in list(ratios.values())[1:])
        print(f"| {n:.0e} | {bare:.0f} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
