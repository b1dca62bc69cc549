"""
MNIST with one hidden layer of 600 units: MHBT as a trainer, beside SGD and SGLD.

Table 1 and Figure 3 of the paper. MHBT runs as the authors' script does: RSGLD with a
fair coin, the paper's noise and ratio (without beta^-d), the batch drawn anew after a
rejection, beta lowered once an epoch. These are *not* draws of a posterior; for those
see ``hastings="exact"`` and ``on_reject="keep"``.

Each run (a method, a learning rate, a round) appends one line to ``--results``, and
``--resume`` goes on where an earlier call stopped. The paper's size is
``--epochs 500 --rounds 30``.

    python examples/mnist.py --data mnist.npz
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
import json
from pathlib import Path
import warnings

from flax import linen as nn
import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.contrib.module import random_flax_module
import numpyro.distributions as dist
import optax
from tqdm.auto import tqdm

from numpyro_mhbt import MHBT, RSGLD, BetaSchedule

RATES = (0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
NOISE = 0.03  # standard deviation of the first weights


class Network(nn.Module):
    """784-600-10 with ReLU."""

    hidden: int = 600

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(10)(nn.relu(nn.Dense(self.hidden)(x)))


def log_likelihood(logits: jax.Array, y: jax.Array, loss: str) -> jax.Array:
    """Of each row: of a softmax, or the script's ten binary outputs."""
    log_p = jax.nn.log_softmax(logits)
    right = jax.nn.one_hot(y, 10)
    if loss == "softmax":
        return jnp.sum(right * log_p, -1)
    log_rest = jnp.log1p(-jnp.exp(jnp.minimum(log_p, -1e-6)))
    return jnp.sum(right * log_p + (1 - right) * log_rest, -1)


def model(x: jax.Array, y: jax.Array, hidden: int, batch_size: int, loss: str) -> None:
    # The prior is all but flat: the paper has none.
    prior = dist.Normal(0, 100)
    net = random_flax_module("net", Network(hidden), prior, input_shape=(1, 784))
    with numpyro.plate("N", len(x), subsample_size=batch_size) as rows:
        logits = net(x[rows] / 255.0)
        numpyro.factor("y", log_likelihood(logits, y[rows], loss))


def load(path: Path | None, smoke: bool) -> tuple[np.ndarray, ...]:
    """Images as bytes in rows of 784, and labels: to train, and to test."""
    if smoke:
        rng = np.random.default_rng(0)
        y = rng.integers(0, 10, 700)
        x = np.clip(rng.integers(0, 60, (700, 784)) + 190 * np.eye(784)[y * 70], 0, 255)
        x = x.astype(np.uint8)
        return x[:500], y[:500], x[500:], y[500:]
    if path is None:
        from numpyro.examples.datasets import MNIST, load_dataset

        found = []
        try:
            for split in ("train", "test"):
                images, labels = load_dataset(MNIST, split=split, shuffle=False)[1](0)
                images = np.round(255 * np.asarray(images)).astype(np.uint8)
                found += [images.reshape(-1, 784), np.asarray(labels)]
        except OSError as error:
            raise SystemExit(
                f"MNIST cannot be downloaded ({error}). Give `--data mnist.npz` with "
                "arrays x_train, y_train, x_test and y_test."
            ) from error
        return tuple(found)
    with np.load(path) as data:
        return tuple(
            data[name].reshape(-1, 784) if name[0] == "x" else data[name]
            for name in ("x_train", "y_train", "x_test", "y_test")
        )


def first_weights(key: jax.Array, net: Network, bias_scale: float) -> dict:
    """Gaussian weights, and biases on a scale of their own."""
    shapes = jax.eval_shape(net.init, key, jnp.zeros((1, 784)))["params"]
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    keys = random.split(key, len(leaves))
    values = [
        (bias_scale if path[-1].key == "bias" else NOISE) * random.normal(k, leaf.shape)
        for k, (path, leaf) in zip(keys, leaves, strict=True)
    ]
    return jax.tree_util.tree_unflatten(tree, values)


Epoch = dict[str, float]


def train_mhbt(
    weights: dict, data: tuple, rate: float, seed: int, args: argparse.Namespace
) -> Iterator[tuple[dict, Epoch]]:
    """Weights and figures after each epoch."""
    schedule = BetaSchedule()
    proposal = RSGLD(
        rate,
        forward_prob=0.5,
        noise="paper",
        hastings="paper",
        beta_schedule=schedule,
    )
    kernel = MHBT(
        partial(model, hidden=args.hidden, batch_size=args.batch_size, loss=args.loss),
        proposal,
        c_n=args.c_n,
        control_variate=None,
        bias_correction=False,
        on_reject="refresh",
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    names = {
        f"net/{layer}.{part}": value
        for layer, parts in weights.items()
        for part, value in parts.items()
    }
    state = kernel.init(random.key(seed), 0, names, data, {})

    @partial(jax.jit, donate_argnums=0)
    def epoch(state: object, data: tuple) -> tuple[object, tuple]:
        def step(state: object, _: None) -> tuple[object, tuple]:
            state = kernel.sample(state, data, {})
            return state, (state.accept_prob, state.forward)

        return lax.scan(step, state, None, length=args.steps)

    for _ in range(args.epochs):
        beta = float(state.beta)
        state, (accept_prob, forward) = epoch(state, data)
        accept_prob, forward = np.asarray(accept_prob), np.asarray(forward, bool)
        found = {name: state.z[name] for name in names}
        yield (
            {
                layer: {part: found[f"net/{layer}.{part}"] for part in parts}
                for layer, parts in weights.items()
            },
            {
                "beta": beta,
                "forward": float(accept_prob[forward].mean()),
                "backward": float(accept_prob[~forward].mean()),
            },
        )


def train_optax(
    optimizer: optax.GradientTransformation,
    noise: float,
    weights: dict,
    data: tuple,
    seed: int,
    args: argparse.Namespace,
) -> Iterator[tuple[dict, Epoch]]:
    """Weights after each epoch of an optimiser, with noise added to each step."""
    x, y = data
    net = Network(args.hidden)

    def loss(weights: dict, rows: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = net.apply({"params": weights}, x[rows] / 255.0)
        return -jnp.mean(log_likelihood(logits, y[rows], args.loss))

    @partial(jax.jit, donate_argnums=0)
    def epoch(carry: tuple, x: jax.Array, y: jax.Array) -> tuple:
        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            weights, state, key = carry
            key, key_rows, key_noise = random.split(key, 3)
            rows = random.randint(key_rows, (args.batch_size,), 0, len(y))
            grads = jax.grad(loss)(weights, rows, x, y)
            updates, state = optimizer.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            if noise:
                flat, unravel = ravel_pytree(weights)
                weights = unravel(flat + noise * random.normal(key_noise, flat.shape))
            return (weights, state, key), None

        return lax.scan(step, carry, None, length=args.steps)[0]

    weights = jax.tree.map(jnp.array, weights)  # these are donated
    carry = weights, optimizer.init(weights), random.key(seed)
    for _ in range(args.epochs):
        carry = epoch(carry, x, y)
        yield carry[0], {}


def trainers(rates: list[float], n: int) -> dict[tuple[str, float], Callable]:
    found: dict[tuple[str, float], Callable] = {}
    for rate in rates:
        sgd = optax.sgd(rate)
        noise = (2 * rate) ** 0.5 / n
        found["RSGLD", rate] = partial(train_mhbt, rate=rate)
        found["SGD", rate] = partial(train_optax, sgd, 0.0)
        found["SGLD", rate] = partial(train_optax, sgd, noise)
    found["RMSprop", 0.005] = partial(train_optax, optax.rmsprop(0.005), 0.0)
    found["Adam", 0.001] = partial(train_optax, optax.adam(0.001), 0.0)
    return found


def test_error(net: Network, weights: dict, x: jax.Array, y: jax.Array) -> float:
    """Percent of wrong labels."""
    logits = net.apply({"params": weights}, x / 255.0)
    return float(100 * jnp.mean(jnp.argmax(logits, -1) != y))


def table(results: list[dict]) -> str:
    """Median, standard deviation and lowest error for each method and rate."""
    lines = [
        "| method | rate | rounds | median error, % | sd | lowest |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for method, rate in sorted({(r["method"], r["rate"]) for r in results}):
        runs = [r for r in results if (r["method"], r["rate"]) == (method, rate)]
        last = np.array([r["error"][-1] for r in runs])
        lowest = min(min(r["error"]) for r in runs)
        lines.append(
            f"| {method} | {rate:g} | {len(runs)} | {np.median(last):.2f} | "
            f"{last.std():.2f} | {lowest:.2f} |"
        )
    return "\n".join(lines)


def plot(results: list[dict], path: str) -> None:
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2))
    left, middle, right = axes
    colors = {"RSGLD": "C0", "SGD": "C1", "SGLD": "C2", "RMSprop": "C3", "Adam": "C4"}
    for method in ("RSGLD", "SGD", "SGLD"):
        runs = [r for r in results if r["method"] == method]
        rates = sorted({r["rate"] for r in runs})
        lowest = [min(min(r["error"]) for r in runs if r["rate"] == e) for e in rates]
        left.semilogx(rates, lowest, "o-", color=colors[method], label=method)
    left.set(xlabel="learning rate", ylabel="lowest test error, %", title="(a)")
    left.legend()
    for method in colors:
        runs = [r for r in results if r["method"] == method]
        if runs:
            best = min(runs, key=lambda r: min(r["error"]))
            epochs = 1 + np.arange(len(best["error"]))
            label = f"{method}, rate {best['rate']:g}"
            middle.semilogy(epochs, best["error"], color=colors[method], label=label)
    middle.set(xlabel="epoch", ylabel="test error, %", title="(b) best rate of each")
    middle.legend(fontsize=8)
    for run in [r for r in results if r["method"] == "RSGLD" and r["round"] == 0]:
        epochs = 1 + np.arange(len(run["error"]))
        right.semilogy(epochs, run["beta"], label=f"rate {run['rate']:g}")
    right.set(xlabel="epoch", ylabel="β", title="The course of β")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--data", type=Path, help=".npz; without it, downloaded")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--methods", nargs="+", help="RSGLD, SGD, SGLD, RMSprop, Adam")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--c-n", type=float, default=100.0)
    parser.add_argument("--hidden", type=int, default=600)
    parser.add_argument("--loss", choices=["softmax", "binary"], default="softmax")
    parser.add_argument("--bias-scale", type=float, default=NOISE)
    parser.add_argument("--results", type=Path, default=Path("mnist.jsonl"))
    parser.add_argument("--resume", action="store_true", help="keep what is there")
    parser.add_argument("--smoke", action="store_true", help="seconds, made-up data")
    parser.add_argument("--out", default="mnist.png")
    args = parser.parse_args()
    if args.smoke:
        args.epochs, args.hidden, args.batch_size, args.c_n = 2, 8, 20, 20.0
        args.rates = [0.1]
    return args


def main() -> None:
    args = parse()
    warnings.filterwarnings("ignore", "MHBT: .*")  # a trainer accepts what it accepts
    x, y, x_test, y_test = map(jnp.asarray, load(args.data, args.smoke))
    args.steps = len(y) // args.batch_size
    net = Network(args.hidden)
    results = []
    if args.resume and args.results.exists():
        results = [json.loads(line) for line in args.results.read_text().splitlines()]
    elif args.results.exists():
        args.results.unlink()
    done = {(r["method"], r["rate"], r["round"]) for r in results}
    for seed in range(args.rounds):
        weights = first_weights(random.key(seed), net, args.bias_scale)
        for (method, rate), train in trainers(args.rates, len(y)).items():
            if args.methods and method not in args.methods:
                continue
            if (method, rate, seed) in done:
                continue
            run: dict = {"method": method, "rate": rate, "round": seed, "error": []}
            bar = tqdm(
                train(weights=weights, data=(x, y), seed=seed, args=args),
                total=args.epochs,
                desc=f"{method}, rate {rate:g}, round {seed}",
            )
            for now, figures in bar:
                run["error"].append(test_error(net, now, x_test, y_test))
                for name, value in figures.items():
                    run.setdefault(name, []).append(value)
                bar.set_postfix(error=run["error"][-1], **figures)
            results.append(run)
            with args.results.open("a") as file:
                file.write(json.dumps(run) + "\n")
            jax.clear_caches()
    print(table(results))
    plot(results, args.out)
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
