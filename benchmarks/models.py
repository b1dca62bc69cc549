"""
Plain NumPyro models with a subsampled plate, and the data for them.

Each factory returns a :class:`Problem`: ``MCMC(kernel(problem.model)).run(key,
*problem.args)``. Factories of ``SYNTHETIC`` take the number of rows, those of ``REAL``
the folder with ``covtype.npz``, ``nycflights13.npz`` and ``mnist.npz`` (one array per
column of the UCI forest cover types and of the flights that left New York City in 2013;
the images and labels of MNIST); all take the batch size ``m``. This lists them, with
the log-density at a point of the prior:

    python benchmarks/models.py [--data DIR]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, trace
from numpyro.infer.util import log_density

GROUPS, HIDDEN, NETWORK_NOISE = 20, 8, 0.3
DAYS, HOURS, ORIGINS = 365, range(5, 24), 3


@dataclass(frozen=True)
class Problem:
    """A model that knows its batch size, and its data."""

    name: str
    model: partial
    args: tuple[jax.Array, ...]

    @property
    def n(self) -> int:
        return len(self.args[-1])

    @property
    def m(self) -> int:
        return min(self.model.keywords["m"], self.n)


# Models. The data are their arguments, the response the last one.


def rows(n: int, m: int) -> numpyro.plate:
    return numpyro.plate("N", n, subsample_size=min(m, n))


def normal(name: str, *shape: int, scale: float = 1.0) -> jax.Array:
    prior = dist.Normal(0, scale).expand(shape).to_event(len(shape))
    return numpyro.sample(name, prior)


def gaussian_model(y: jax.Array, *, m: int) -> None:
    mu = normal("mu", y.shape[1], scale=10.0)
    with rows(len(y), m):
        yb = numpyro.subsample(y, event_dim=1)
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=yb)


def logistic_model(x: jax.Array, y: jax.Array, *, m: int) -> None:
    w = normal("w", x.shape[1])
    with rows(len(y), m):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=xb @ w), obs=yb)


def poisson_model(x: jax.Array, y: jax.Array, *, m: int) -> None:
    w = normal("w", x.shape[1], scale=2.0)
    with rows(len(y), m):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Poisson(jnp.exp(xb @ w)), obs=yb)


def linear_model(x: jax.Array, y: jax.Array, *, m: int) -> None:
    w = normal("w", x.shape[1])
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with rows(len(y), m):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(xb @ w, sigma), obs=yb)


def robust_model(x: jax.Array, y: jax.Array, *, m: int) -> None:
    w = normal("w", x.shape[1])
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with rows(len(y), m):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.StudentT(4.0, xb @ w, sigma), obs=yb)


def student_model(x: jax.Array, y: jax.Array, *, m: int) -> None:
    """With a known scale, as bounds on the likelihood ask for."""
    w = normal("w", x.shape[1])
    with rows(len(y), m):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.StudentT(4.0, xb @ w, 1.0), obs=yb)


def gamma_model(x: jax.Array, y: jax.Array, *, m: int) -> None:
    """Mean exp(x w), and a shape."""
    w = normal("w", x.shape[1])
    shape = numpyro.sample("shape", dist.Gamma(2.0, 1.0))
    with rows(len(y), m):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Gamma(shape, shape * jnp.exp(-(xb @ w))), obs=yb)


def mixture_model(y: jax.Array, *, m: int) -> None:
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    ordered = dist.transforms.OrderedTransform()
    prior = dist.Normal(0, 3).expand([2]).to_event(1)
    mu = numpyro.sample("mu", dist.TransformedDistribution(prior, ordered))
    which = dist.Categorical(probs=jnp.stack([share, 1 - share]))
    with rows(len(y), m) as idx:
        mixture = dist.MixtureSameFamily(which, dist.Normal(mu, 1))
        numpyro.sample("y", mixture, obs=y[idx])


def hierarchical_model(x: jax.Array, group: jax.Array, y: jax.Array, *, m: int) -> None:
    w = normal("w", x.shape[1])
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    effects = tau * normal("effects", GROUPS)  # not centred
    with rows(len(y), m) as idx:
        loc = x[idx] @ w + effects[group[idx]]
        numpyro.sample("y", dist.Normal(loc, sigma), obs=y[idx])


def truncated_model(y: jax.Array, *, m: int) -> None:
    """The mean in a cube; the noise differs from column to column."""
    d = y.shape[1]
    mu = numpyro.sample("mu", dist.Uniform(-3, 3).expand([d]).to_event(1))
    with rows(len(y), m):
        yb = numpyro.subsample(y, event_dim=1)
        scale = jnp.linspace(0.5, 2, d)
        numpyro.sample("y", dist.Normal(mu, scale).to_event(1), obs=yb)


def network_model(x: jax.Array, y: jax.Array, *, m: int) -> None:
    w_in, b_in = normal("w_in", x.shape[1], HIDDEN), normal("b_in", HIDDEN)
    w_out, b_out = normal("w_out", HIDDEN), normal("b_out")
    with rows(len(y), m):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        loc = jnp.tanh(xb @ w_in + b_in) @ w_out + b_out
        numpyro.sample("y", dist.Normal(loc, NETWORK_NOISE), obs=yb)


def funnel_model(y: jax.Array, *, m: int) -> None:
    """All rows together see x with unit noise, too much to fill the neck."""
    s = normal("s", scale=1.5)
    scale = jnp.exp(s / 2)
    x = numpyro.sample("x", dist.Normal(0, scale).expand([y.shape[1]]).to_event(1))
    with rows(len(y), m):
        yb = numpyro.subsample(y, event_dim=1)
        numpyro.sample("y", dist.Normal(x, len(y) ** 0.5).to_event(1), obs=yb)


# Synthetic data


def gaussian(n: int = 10**4, *, m: int = 1000) -> Problem:
    y = jnp.linspace(-1, 1, 10) + random.normal(random.key(0), (n, 10))
    return Problem("gaussian", partial(gaussian_model, m=m), (y,))


def logistic(n: int = 10**5, *, m: int = 1000) -> Problem:
    key_x, key_w, key_y = random.split(random.key(1), 3)
    x = random.normal(key_x, (n, 20))
    w = 0.3 * random.normal(key_w, (20,))
    y = random.bernoulli(key_y, jax.nn.sigmoid(x @ w)).astype(jnp.float32)
    return Problem("logistic", partial(logistic_model, m=m), (x, y))


def poisson(n: int = 10**5, *, m: int = 1000) -> Problem:
    key_x, key_y = random.split(random.key(2))
    x = bounded_design(key_x, n, 10)
    y = random.poisson(key_y, jnp.exp(x @ jnp.linspace(-0.5, 1, 10)))
    args = x, y.astype(jnp.float32)
    return Problem("poisson", partial(poisson_model, m=m), args)


def linear(n: int = 10**5, *, m: int = 1000) -> Problem:
    key_x, key_y = random.split(random.key(3))
    x = random.normal(key_x, (n, 10))
    y = x @ jnp.linspace(-1, 1, 10) + 0.7 * random.normal(key_y, (n,))
    return Problem("linear", partial(linear_model, m=m), (x, y))


def robust(n: int = 10**5, *, m: int = 1000) -> Problem:
    key_x, key_y = random.split(random.key(4))
    x = random.normal(key_x, (n, 10))
    y = x.sum(1) + random.t(key_y, 4.0, (n,))
    return Problem("robust", partial(robust_model, m=m), (x, y))


def student(n: int = 10**5, *, m: int = 1000) -> Problem:
    return Problem("student", partial(student_model, m=m), robust(n).args)


def gamma(n: int = 10**5, *, m: int = 1000) -> Problem:
    key_x, key_y = random.split(random.key(5))
    x = bounded_design(key_x, n, 5)
    y = jnp.exp(x @ jnp.linspace(-1, 1, 5)) * random.gamma(key_y, 2.0, (n,)) / 2
    return Problem("gamma", partial(gamma_model, m=m), (x, jnp.maximum(y, 1e-6)))


def mixture(n: int = 10**5, *, m: int = 1000) -> Problem:
    key_which, key_y = random.split(random.key(6))
    mu = jnp.where(random.bernoulli(key_which, 0.3, (n,)), -1.5, 1.5)
    y = mu + random.normal(key_y, (n,))
    return Problem("mixture", partial(mixture_model, m=m), (y,))


def hierarchical(n: int = 10**5, *, m: int = 1000) -> Problem:
    key_x, key_group, key_effects, key_y = random.split(random.key(7), 4)
    x = random.normal(key_x, (n, 3))
    group = random.randint(key_group, (n,), 0, GROUPS)
    effects = 0.5 * random.normal(key_effects, (GROUPS,))
    y = x @ jnp.array([1.0, -1.0, 0.5]) + effects[group]
    args = x, group, y + random.normal(key_y, (n,))
    return Problem("hierarchical", partial(hierarchical_model, m=m), args)


def network(n: int = 2 * 10**4, *, m: int = 1000) -> Problem:
    key_x, key_y = random.split(random.key(8))
    x = random.normal(key_x, (n, 4))
    y = jnp.sin(2 * x[:, 0]) + jnp.tanh(x[:, 1] * x[:, 2]) - 0.5 * x[:, 3]
    args = x, y + NETWORK_NOISE * random.normal(key_y, (n,))
    return Problem("network", partial(network_model, m=m), args)


def funnel(n: int = 10**4, *, m: int = 1000) -> Problem:
    y = n**0.5 * random.normal(random.key(9), (n, 5))
    # The mean of the rows, which is all that counts, is 0.5 whatever n is.
    return Problem("funnel", partial(funnel_model, m=m), (y - y.mean(0) + 0.5,))


def truncated(n: int = 10**5, *, m: int = 1000) -> Problem:
    noise = random.normal(random.key(10), (n, 20))
    y = jnp.linspace(-1, 1, 20) + jnp.linspace(0.5, 2, 20) * noise
    return Problem("truncated", partial(truncated_model, m=m), (y,))


def bounded_design(key: jax.Array, n: int, d: int) -> jax.Array:
    """An intercept and columns in (-1, 1), whose exp(x w) float32 can hold."""
    x = random.uniform(key, (n, d - 1), minval=-1.0)
    return jnp.concatenate([jnp.ones((n, 1)), x], axis=1)


# Real data


def covtype_logistic(data: Path, *, m: int = 1000) -> Problem:
    """Class 2 against the rest, on the ten numeric columns."""
    x, y = covtype(data)
    return Problem(
        "covtype_logistic", partial(logistic_model, m=m), design(x[:, :10], y)
    )


def covtype_all(data: Path, *, m: int = 1000) -> Problem:
    """
    On all 54 columns, without intercept.

    The indicators of area and of soil each sum to one: one direction is left to the
    prior, and soils that are seldom seen nearly are.
    """
    x, y = covtype(data)
    x = np.concatenate([standardise(x[:, :10]), x[:, 10:]], axis=1)
    args = jnp.asarray(x), jnp.asarray(y)
    return Problem("covtype_all", partial(logistic_model, m=m), args)


def covtype_standard(data: Path, *, m: int = 1000) -> Problem:
    """
    As in NumPyro's example: all columns standardised, indicators as well.

    Where a soil is rare its column has large entries, 440 for one of three rows.
    """
    args = design(*covtype(data))
    return Problem("covtype_standard", partial(logistic_model, m=m), args)


def covtype(data: Path) -> tuple[np.ndarray, np.ndarray]:
    table = np.load(data / "covtype.npz")
    return table["x"], (table["y"] == 2).astype(np.float32)


def flights_linear(data: Path, *, m: int = 1000) -> Problem:
    return Problem("flights_linear", partial(linear_model, m=m), arrival_delay(data))


def flights_robust(data: Path, *, m: int = 1000) -> Problem:
    return Problem("flights_robust", partial(robust_model, m=m), arrival_delay(data))


def arrival_delay(data: Path) -> tuple[jax.Array, jax.Array]:
    """The delay of each flight that arrived, and what was known before, or of it."""
    table = np.load(data / "nycflights13.npz")
    names = "dep_delay", "distance", "air_time", "hour"
    columns = [table[name] for name in names]
    columns += waves(day_of_year(table) / DAYS, 1)
    columns += [table["origin"] == code for code in range(1, ORIGINS)]
    x = np.stack(columns, axis=1).astype(np.float64)
    y = table["arr_delay"]
    arrived = ~np.isnan(y) & ~np.isnan(x).any(axis=1)
    return design(x[arrived], standardise(y[arrived]))


def flights_poisson(data: Path, *, m: int = 1000) -> Problem:
    """How many flights are to leave each airport, in each hour of the year."""
    table = np.load(data / "nycflights13.npz")
    counts = np.zeros((DAYS, 24, ORIGINS))
    np.add.at(counts, (day_of_year(table), table["hour"], table["origin"]), 1)
    day, hour, origin = (
        a.ravel()
        for a in np.meshgrid(range(DAYS), HOURS, range(ORIGINS), indexing="ij")
    )
    weekday = (day + 1) % 7  # 1 January 2013 was a Tuesday; Monday is 0
    columns = [np.ones(len(day)), *waves(hour / 24, 2), *waves(day / DAYS, 1)]
    columns += [origin == 1, origin == 2, weekday == 5, weekday == 6]
    x = jnp.asarray(np.stack(columns, axis=1), jnp.float32)
    y = jnp.asarray(counts[day, hour, origin], jnp.float32)
    return Problem("flights_poisson", partial(poisson_model, m=m), (x, y))


def digits(data: Path, *, m: int = 1000) -> Problem:
    """7 against 9 of MNIST, on 50 principal components."""
    table = np.load(data / "mnist.npz")
    x, y = table["x_train"].reshape(-1, 784) / 255.0, table["y_train"]
    chosen = (y == 7) | (y == 9)
    x, y = x[chosen], (y[chosen] == 9).astype(np.float32)
    x = x - x.mean(0)
    axes = np.linalg.eigh(x.T @ x)[1][:, :-51:-1]
    return Problem("digits", partial(logistic_model, m=m), design(x @ axes, y))


def day_of_year(table: Mapping[str, np.ndarray]) -> np.ndarray:
    first = np.arange("2013-01", "2014-01", dtype="datetime64[M]").astype("M8[D]")
    starts = (first - first[0]).astype(int)
    return starts[table["month"] - 1] + table["day"] - 1


def waves(phase: np.ndarray, harmonics: int) -> list[np.ndarray]:
    angles = [2 * np.pi * k * phase for k in range(1, harmonics + 1)]
    return [wave(angle) for angle in angles for wave in (np.sin, np.cos)]


def standardise(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64)
    return ((x - x.mean(0)) / x.std(0)).astype(np.float32)


def design(x: np.ndarray, y: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """An intercept and the standardised columns, with the response."""
    ones = np.ones((len(x), 1), np.float32)
    return jnp.asarray(np.concatenate([ones, standardise(x)], 1)), jnp.asarray(y)


SYNTHETIC: dict[str, Callable[..., Problem]] = {
    factory.__name__: factory
    for factory in (
        gaussian,
        logistic,
        poisson,
        linear,
        robust,
        gamma,
        mixture,
        hierarchical,
        network,
        funnel,
    )
}
REAL: dict[str, Callable[..., Problem]] = {
    factory.__name__: factory
    for factory in (
        covtype_logistic,
        covtype_all,
        covtype_standard,
        flights_linear,
        flights_poisson,
        flights_robust,
        digits,
    )
}


def describe(problem: Problem) -> str:
    sites = trace(seed(problem.model, random.key(0))).get_trace(*problem.args)
    latent = {
        name: site["value"]
        for name, site in sites.items()
        if site["type"] == "sample" and not site["is_observed"]
    }
    model = seed(problem.model, random.key(1))
    value, _ = log_density(model, problem.args, {}, latent)
    dim = sum(jnp.size(v) for v in latent.values())
    return f"{problem.name:>16} n={problem.n} m={problem.m} d={dim} {value:.4g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--data", type=Path, help="folder of the real data")
    args = parser.parse_args()
    for factory in SYNTHETIC.values():
        print(describe(factory()))
    for factory in REAL.values() if args.data else ():
        print(describe(factory(args.data)))


if __name__ == "__main__":
    main()
