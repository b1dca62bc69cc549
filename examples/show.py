"""What the example posteriors share: arguments, a run, and the pictures of it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import arviz as az
from jax import random
import jax.numpy as jnp
import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import numpyro
from numpyro.infer import MCMC, Predictive

from numpyro_mhbt import MHBT, Taylor, batch_report, full_data


def chain_method(name: str) -> str:
    if name == "parallel":
        numpyro.set_host_device_count(4)  # before JAX starts
    return name


def parse(doc: str, name: str, *, order: int) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc.strip().split("\n")[0])
    parser.add_argument("--data", type=Path, help=".npz; without it, fetched")
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument(
        "--order", type=int, default=order, choices=[0, 1, 2], help="of Taylor"
    )
    parser.add_argument("--num-samples", type=int, default=4000)
    parser.add_argument("--chain-method", type=chain_method, default="vectorized")
    parser.add_argument("--smoke", action="store_true", help="seconds, made-up data")
    parser.add_argument("--out", default=name, help="how the pictures' names begin")
    return parser


def sample(
    model: Callable,
    args: argparse.Namespace,
    *data: object,
    **settings: object,
) -> MCMC:
    """Four chains; ``settings`` are those of the kernel."""
    control = Taylor(order=args.order)
    kernel = MHBT(model, control_variate=control, steps_per_draw=5, **settings)
    mcmc = MCMC(
        kernel,
        num_warmup=50 if args.smoke else 2000,
        num_samples=50 if args.smoke else args.num_samples,
        num_chains=4,
        chain_method=args.chain_method,
        jit_model_args=True,
    )
    fields = "accept_prob", "noise_variance", "temperature"
    mcmc.run(random.key(1), *data, extra_fields=fields)
    mcmc.print_summary()
    print(batch_report(mcmc))
    return mcmc


def trace_and_rank(
    mcmc: MCMC,
    out: str,
    *,
    columns: tuple[str, ...] = (),
    var_names: list[str] | None = None,
) -> None:
    """ArviZ's pictures of the chains; ``columns`` are the names of what w weighs."""
    named = {}
    if columns:
        named = {"coords": {"column": list(columns)}, "dims": {"w": ["column"]}}
    # log_likelihood would be a number for each of all rows and each draw.
    data = az.from_numpyro(mcmc, log_likelihood=False, **named)
    trace = getattr(az, "plot_trace_dist", None) or az.plot_trace  # ArviZ 1.x, 0.x
    one_by_one = partial(trace, compact=False)
    for name, plot in ("trace", one_by_one), ("rank", az.plot_rank):
        plot(data, var_names=var_names)
        figure = plt.gcf()
        if not figure.get_layout_engine():
            figure.tight_layout()
        figure.savefig(f"{out}_{name}.png", dpi=60)
        plt.close("all")
        print(f"saved {out}_{name}.png")


def replicate(model: Callable, mcmc: MCMC, *data: object, site: str) -> np.ndarray:
    """Data as the model would have them, from a hundred of the draws."""
    samples = mcmc.get_samples()
    keep = jnp.linspace(0, len(next(iter(samples.values()))) - 1, 100).astype(int)
    some = {name: value[keep] for name, value in samples.items()}
    return np.asarray(Predictive(full_data(model), some)(random.key(2), *data)[site])


def check_distribution(
    observed: np.ndarray,
    replicated: np.ndarray,
    width: float,
    label: str,
    title: str,
    path: str,
) -> None:
    """The observed values beside those that the draws would have produced."""
    low, high = np.percentile(observed, [0.5, 99.5])
    # Whole numbers fall between the edges.
    edges = np.arange(np.floor(low / width), high / width + 1) * width - width / 2
    center = (edges[1:] + edges[:-1]) / 2

    def density(values: np.ndarray) -> np.ndarray:
        return np.histogram(values, edges)[0] / values.size / np.diff(edges)

    figure, axis = plt.subplots(figsize=(7, 4.2))
    axis.stairs(density(observed), edges, fill=True, color="0.8", label="observed")
    bands = np.quantile([density(row) for row in replicated], [0.05, 0.5, 0.95], axis=0)
    axis.plot(center, bands[1], "C0", label="replicated, median")
    axis.fill_between(
        center, bands[0], bands[2], color="C0", alpha=0.3, label="replicated, 5 to 95%"
    )
    axis.set(xlabel=label, ylabel="density", title=title)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
    print(f"saved {path}")


def check_calibration(
    observed: np.ndarray, replicated: np.ndarray, title: str, path: str
) -> None:
    """How often what is predicted with some probability comes true."""
    chance = replicated.mean(0)
    bins = np.clip((chance * 20).astype(int), 0, 19)
    count = np.bincount(bins, minlength=20)
    used = count > 20
    predicted, found = (
        np.bincount(bins, values, 20)[used] / count[used]
        for values in (chance, observed)
    )
    error = 2 * np.sqrt(predicted * (1 - predicted) / count[used])
    figure, axis = plt.subplots(figsize=(5, 4.6))
    axis.errorbar(predicted, found, error, fmt="o", ms=4, label="rows, ± 2 errors")
    axis.plot([0, 1], [0, 1], "k-", lw=1, label="calibrated")
    axis.set(xlabel="predicted probability", ylabel="observed frequency", title=title)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
    wrong = np.mean((chance > 0.5) != (observed > 0.5))
    print(f"saved {path}; {100 * wrong:.1f}% of the rows are predicted wrongly")


def describe_temperature(mcmc: MCMC) -> str:
    return f"T = {float(mcmc.get_extra_fields()['temperature'][-1]):.3g}"
