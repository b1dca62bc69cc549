"""
MHBT as a trainer of networks, beside SGD and its kin: what the examples share.

MHBT runs as the authors' script does: RSGLD with a fair coin, the paper's noise and
ratio (without beta^-d), the next batch taken after a rejection, beta lowered once an
epoch. A step evaluates one gradient, as one of SGD does. These are *not* draws of a
posterior; for those see ``hastings="exact"`` and ``on_reject="keep"``.

Each run (a method, a learning rate, a round) appends one line to ``--results``, and
``--resume`` goes on where an earlier call stopped.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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
from matplotlib.ticker import MaxNLocator, ScalarFormatter
import numpy as np
import numpyro
from numpyro.contrib.module import random_flax_module
import numpyro.distributions as dist
import optax
from tqdm.auto import tqdm

from numpyro_mhbt import MHBT, RSGLD, BetaSchedule
from numpyro_mhbt.plates import draw_rows
from numpyro_mhbt.vectors import flatten, normal

COLORS = {"RSGLD": "C0", "SGD": "C1", "SGLD": "C2", "RMSprop": "C3", "Adam": "C4"}
LOSSES = "softmax", "binary", "clipped"
Epoch = dict[str, float]
Trainer = Callable[..., Iterator[tuple[dict, Epoch]]]


@dataclass(frozen=True)
class Task:
    """A network, and the images (as bytes) and labels it learns from."""

    net: nn.Module
    train: tuple[jax.Array, jax.Array]
    test: tuple[jax.Array, jax.Array]
    weight_scale: float
    bias_scale: float
    loss: str
    batch_size: int

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (1, *self.train[0].shape[1:])


def log_likelihood(logits: jax.Array, y: jax.Array, loss: str) -> jax.Array:
    """
    Of each row: of a softmax, or the script's ten binary outputs.

    ``"clipped"`` is the latter with probabilities held between 1e-10 and 1 - 1e-7, as
    was usual in TensorFlow: beyond, the gradient is zero, and a network that is sure
    and wrong learns no more.
    """
    log_p = jax.nn.log_softmax(logits)
    right = jax.nn.one_hot(y, 10)
    if loss == "softmax":
        return jnp.sum(right * log_p, -1)
    if loss == "clipped":
        p = jnp.clip(jnp.exp(log_p), 1e-10, 1 - 1e-7)
        return jnp.sum(right * jnp.log(p) + (1 - right) * jnp.log1p(-p), -1)
    log_rest = jnp.log1p(-jnp.exp(jnp.minimum(log_p, -1e-6)))
    return jnp.sum(right * log_p + (1 - right) * log_rest, -1)


def model(x: jax.Array, y: jax.Array, task: Task) -> None:
    # Flat: the paper has none.
    prior = dist.ImproperUniform(dist.constraints.real, (), (), validate_args=False)
    net = random_flax_module("net", task.net, prior, input_shape=task.input_shape)
    with numpyro.plate("N", len(x), subsample_size=task.batch_size) as rows:
        logits = net(x[rows] / 255.0)
        numpyro.factor("y", log_likelihood(logits, y[rows], task.loss))


def first_weights(key: jax.Array, task: Task) -> dict:
    """Gaussian weights, and biases on a scale of their own."""
    shapes = jax.eval_shape(task.net.init, key, jnp.zeros(task.input_shape))["params"]
    leaves, tree = jax.tree_util.tree_flatten_with_path(shapes)
    scales = [
        task.bias_scale if path[-1].key == "bias" else task.weight_scale
        for path, _ in leaves
    ]
    keys = random.split(key, len(leaves))
    values = [
        scale * random.normal(k, leaf.shape)
        for scale, k, (_, leaf) in zip(scales, keys, leaves, strict=True)
    ]
    return jax.tree_util.tree_unflatten(tree, values)


def start_mhbt(
    task: Task,
    weights: dict,
    seed: int,
    *,
    rate: float,
    c_n: float,
    beta: float | None = None,
) -> tuple[Callable, object]:
    """An epoch (from a state and the data to a state and figures), and the start."""
    proposal = RSGLD(
        rate,
        beta,
        forward_prob=0.5,
        noise="paper",
        hastings="paper",
        beta_schedule=BetaSchedule(),
    )
    kernel = MHBT(
        partial(model, task=task),
        proposal,
        c_n=c_n,
        control_variate=None,
        bias_correction=False,
        on_reject="refresh",
        adapt_step_size=False,
        adapt_mass_matrix=False,
    )
    steps = len(task.train[1]) // task.batch_size

    @partial(jax.jit, donate_argnums=0)
    def epoch(state: object, data: tuple) -> tuple[object, tuple]:
        def step(state: object, _: None) -> tuple[object, tuple]:
            state = kernel.sample(state, data, {})
            return state, (state.accept_prob, state.forward)

        return lax.scan(step, state, None, length=steps, unroll=2)

    names = {
        f"net/{layer}.{part}": value
        for layer, parts in weights.items()
        for part, value in parts.items()
    }
    return epoch, kernel.init(random.key(seed), 0, names, task.train, {})


def train_mhbt(
    task: Task, weights: dict, seed: int, epochs: int, **settings: float | None
) -> Iterator[tuple[dict, Epoch]]:
    """Weights and figures after each epoch."""
    epoch, state = start_mhbt(task, weights, seed, **settings)
    for _ in range(epochs):
        beta = float(state.beta)
        state, (accept_prob, forward) = epoch(state, task.train)
        accept_prob, forward = np.asarray(accept_prob), np.asarray(forward)
        found = {
            layer: {part: state.z[f"net/{layer}.{part}"] for part in parts}
            for layer, parts in weights.items()
        }
        yield (
            found,
            {
                "beta": beta,
                "forward": float(accept_prob[forward == 1].mean()),
                "backward": float(accept_prob[forward == 0].mean()),
            },
        )


def batch_stream(key: jax.Array, n: int, m: int) -> tuple[jax.Array, jax.Array]:
    """The next batch of the kernel: its key for a step, split as the kernel does."""
    key, key_step = random.split(key)
    _, key_batch, _ = random.split(key_step, 3)
    return key, draw_rows(key_batch, n, m)


def start_optax(
    task: Task,
    weights: dict,
    seed: int,
    *,
    optimizer: optax.GradientTransformation,
    noise: float = 0.0,
) -> tuple[Callable, tuple]:
    """
    As :func:`start_mhbt`, of an optimiser with noise added to each step.

    The batches are those that MHBT draws.
    """
    n, m = len(task.train[1]), task.batch_size

    def loss(weights: dict, x: jax.Array, y: jax.Array) -> jax.Array:
        logits = task.net.apply({"params": weights}, x / 255.0)
        return -jnp.mean(log_likelihood(logits, y, task.loss))

    @partial(jax.jit, donate_argnums=0)
    def epoch(carry: tuple, data: tuple) -> tuple[tuple, None]:
        x, y = data

        def step(carry: tuple, _: None) -> tuple[tuple, None]:
            weights, state, key = carry
            key_noise = random.fold_in(key, 0)
            key, rows = batch_stream(key, n, m)
            grads = jax.grad(loss)(weights, x[rows], y[rows])
            updates, state = optimizer.update(grads, state, weights)
            weights = optax.apply_updates(weights, updates)
            if noise:
                unravel = ravel_pytree(weights)[1]
                flat = flatten(weights)
                weights = unravel(flat + noise * normal(key_noise, flat))
            return (weights, state, key), None

        (*state, key), _ = lax.scan(step, carry, None, length=n // m)
        # Another key is split off where the kernel looks at beta.
        return (*state, random.split(key)[0]), None

    weights = jax.tree.map(jnp.array, weights)  # these are donated
    key = random.split(random.key(seed), 3)[0]  # as the kernel starts
    return epoch, (weights, optimizer.init(weights), key)


def train_optax(
    task: Task, weights: dict, seed: int, epochs: int, **settings: object
) -> Iterator[tuple[dict, Epoch]]:
    """Weights after each epoch."""
    epoch, carry = start_optax(task, weights, seed, **settings)
    for _ in range(epochs):
        carry, _ = epoch(carry, task.train)
        yield carry[0], {}


def trainers(
    rates: list[float], n: int, c_n: float, beta: float | None
) -> dict[tuple[str, float], Trainer]:
    found: dict[tuple[str, float], Trainer] = {}
    for rate in rates:
        sgd = optax.sgd(rate)
        noise = (2 * rate) ** 0.5 / n
        found["RSGLD", rate] = partial(train_mhbt, rate=rate, c_n=c_n, beta=beta)
        found["SGD", rate] = partial(train_optax, optimizer=sgd)
        found["SGLD", rate] = partial(train_optax, optimizer=sgd, noise=noise)
    for name, rate, optimizer in (
        ("RMSprop", 0.005, optax.rmsprop(0.005)),
        ("Adam", 0.001, optax.adam(0.001)),
    ):
        found[name, rate] = partial(train_optax, optimizer=optimizer)
    return found


@partial(jax.jit, static_argnums=0)
def predict(net: nn.Module, weights: dict, x: jax.Array) -> jax.Array:
    return jax.nn.softmax(net.apply({"params": weights}, x / 255.0))


def probabilities(task: Task, weights: dict) -> np.ndarray:
    """Of each class, for each image of the test."""
    x = task.test[0]
    parts = (x[i : i + 1000] for i in range(0, len(x), 1000))
    return np.concatenate([predict(task.net, weights, part) for part in parts])


def scores(p: np.ndarray, y: np.ndarray) -> Epoch:
    """Error in percent, log-likelihood by image, and expected calibration error."""
    right = p.argmax(-1) == y
    sure = p.max(-1)
    bins = np.minimum((sure * 15).astype(int), 14)
    gap = np.bincount(bins, right - sure, 15)
    return {
        "error": float(100 * np.mean(~right)),
        "log_likelihood": float(np.log(p[np.arange(len(y)), y] + 1e-30).mean()),
        "calibration": float(100 * np.abs(gap).sum() / len(y)),
    }


def table(results: list[dict]) -> str:
    """For each rate and method: median error (standard deviation) / lowest, in %."""
    cells = {}
    for method, rate, runs in by_setting(results):
        last = np.array([r["error"][-1] for r in runs])
        lowest = min(min(r["error"]) for r in runs)
        text = f"{np.median(last):.2f} ({last.std():.2f}) / {lowest:.2f}"
        cells[rate, method] = text if len(runs) > 1 else f"{last[0]:.2f} / {lowest:.2f}"
    methods = [m for m in COLORS if any(name == m for _, name in cells)]
    lines = [f"| rate | {' | '.join(methods)} |", "| --- " * (len(methods) + 1) + "|"]
    for rate in sorted({rate for rate, _ in cells}):
        row = (cells.get((rate, method), "") for method in methods)
        lines.append(f"| {rate:g} | {' | '.join(row)} |")
    return "\n".join(lines)


def by_setting(results: list[dict]) -> Iterator[tuple[str, float, list[dict]]]:
    for method, rate in dict.fromkeys((r["method"], r["rate"]) for r in results):
        yield (
            method,
            rate,
            [r for r in results if (r["method"], r["rate"]) == (method, rate)],
        )


def ensemble_table(results: list[dict]) -> str:
    """
    What averaging the predictions of the second half of the epochs brings.

    For each method at the rate whose average is best; medians over the rounds.
    """
    names = {"error": "error, %", "log_likelihood": "log-likelihood"}
    names["calibration"] = "calibration error, %"
    lines = [
        "| method | rate | | " + " | ".join(names.values()) + " |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    best: dict[str, tuple[float, list[dict]]] = {}
    for method, rate, runs in by_setting(results):

        def error(runs: list[dict]) -> float:
            return float(np.median([r["average"]["error"] for r in runs]))

        if method not in best or error(runs) < error(best[method][1]):
            best[method] = rate, runs
    for method in filter(best.get, COLORS):
        rate, runs = best[method]
        for kind, label in ("best", "best network"), ("average", "average"):
            cells = [f"{np.median([r[kind][k] for r in runs]):.3g}" for k in names]
            lines.append(f"| {method} | {rate:g} | {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(results: list[dict], path: str) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(12, 8.5))
    (a, b), (c, d) = axes
    settings = list(by_setting(results))
    for method in ("RSGLD", "SGD", "SGLD"):
        mine = sorted((rate, runs) for name, rate, runs in settings if name == method)
        if not mine:
            continue
        rates = [rate for rate, _ in mine]
        lowest = [min(min(r["error"]) for r in runs) for _, runs in mine]
        style = {"RSGLD": "o-", "SGD": "s--", "SGLD": "^:"}[method]
        a.loglog(rates, lowest, style, color=COLORS[method], label=method)
    a.set(xlabel="learning rate", ylabel="lowest test error, %", title="(a) by rate")
    a.legend()
    for method, color in COLORS.items():
        runs = [r for r in results if r["method"] == method]
        if runs:
            best = min(runs, key=lambda r: min(r["error"]))
            epochs = 1 + np.arange(len(best["error"]))
            label = f"{method}, rate {best['rate']:g}"
            b.semilogy(epochs, best["error"], color=color, label=label)
    b.set(xlabel="epoch", ylabel="test error, %", title="(b) best rate of each")
    b.legend(fontsize=8)
    first = [r for r in results if r["method"] == "RSGLD" and r["round"] == 0]
    for k, run in enumerate(sorted(first, key=lambda r: r["rate"])):
        epochs = 1 + np.arange(len(run["error"]))
        color = plt.cm.viridis(k / max(len(first) - 1, 1))
        c.semilogy(epochs, run["beta"], color=color, label=f"rate {run['rate']:g}")
        d.plot(epochs, run["forward"], color=color)
        d.plot(epochs, run["backward"], ":", color=color)
    c.set(xlabel="epoch", ylabel="β", title="(c) the course of β")
    if first:
        c.legend(fontsize=8)
    d.plot([], [], "k-", label="forward")
    d.plot([], [], "k:", label="backward")
    d.set(xlabel="epoch", ylabel="mean acceptance", title="(d) acceptance of RSGLD")
    d.legend(fontsize=8)
    for axis in b, c, d:
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axis in a, b, c:
        axis.yaxis.set_major_formatter(ScalarFormatter())
    for axis in a, b:
        axis.yaxis.set_minor_formatter(ScalarFormatter())
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def arguments(doc: str, name: str, rates: tuple[float, ...]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc.strip().split("\n")[0])
    parser.add_argument("--data", type=Path, help=".npz; without it, downloaded")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rates", type=float, nargs="+", default=rates)
    parser.add_argument("--methods", nargs="+", help="RSGLD, SGD, SGLD, RMSprop, Adam")
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--c-n", type=float, default=100.0)
    parser.add_argument("--beta", type=float, help="the first; else found by itself")
    parser.add_argument("--loss", choices=LOSSES, default="softmax")
    parser.add_argument("--results", type=Path, default=Path(f"{name}.jsonl"))
    parser.add_argument("--resume", action="store_true", help="keep what is there")
    parser.add_argument("--smoke", action="store_true", help="seconds, made-up data")
    parser.add_argument("--out", default=f"{name}.png")
    return parser


def made_up(*shape: int) -> tuple[np.ndarray, ...]:
    """Images that have a bright pixel where their label says."""
    rng = np.random.default_rng(0)
    y = rng.integers(0, 10, 300)
    x = rng.integers(0, 60, (300, np.prod(shape)))
    x[np.arange(300), y * 70] += 190
    x = x.reshape(300, *shape).astype(np.uint8)
    return x[:200], y[:200], x[200:], y[200:]


def compare(task: Task, args: argparse.Namespace) -> None:
    """All runs that are not yet in the file of results; then tables and a picture."""
    warnings.filterwarnings("ignore", "MHBT: .*")  # a trainer accepts what it accepts
    results = []
    if args.resume and args.results.exists():
        results = [json.loads(line) for line in args.results.read_text().splitlines()]
    elif args.results.exists():
        args.results.unlink()
    done = {(r["method"], r["rate"], r["round"]) for r in results}
    for seed in range(args.rounds):
        every = trainers(args.rates, len(task.train[1]), args.c_n, args.beta)
        for (method, rate), train in every.items():
            if args.methods and method not in args.methods:
                continue
            if (method, rate, seed) not in done:
                results.append(one_run(task, train, method, rate, seed, args.epochs))
                with args.results.open("a") as file:
                    file.write(json.dumps(results[-1]) + "\n")
                jax.clear_caches()
    print(table(results), end="\n\n")
    print(ensemble_table(results))
    plot(results, args.out)
    print(f"saved {args.out}")


def one_run(
    task: Task, train: Trainer, method: str, rate: float, seed: int, epochs: int
) -> dict:
    run: dict = {"method": method, "rate": rate, "round": seed, "error": []}
    weights = first_weights(random.key(seed), task)
    y = np.asarray(task.test[1])
    average, best = np.zeros((len(y), 10)), None
    bar = tqdm(
        train(task, weights, seed, epochs),
        total=epochs,
        desc=f"{method}, rate {rate:g}, round {seed}",
    )
    for i, (now, figures) in enumerate(bar):
        p = probabilities(task, now)
        found = scores(p, y)
        run["error"].append(found["error"])
        if best is None or found["error"] < best["error"]:
            best = found
        if i >= epochs // 2:
            average += p / (epochs - epochs // 2)
        for name, value in figures.items():
            run.setdefault(name, []).append(value)
        bar.set_postfix(error=run["error"][-1], **figures)
    return run | {"best": best, "average": scores(average, y)}
