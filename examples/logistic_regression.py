"""
Logistic regression: where lodgepole pines grow.

581012 patches of forest in Colorado, with ten measures of place, slope and light. With
a control variate of order 2 the draws are of the posterior itself (T = 1), from batches
of 1000 rows. So many rows show that the model is too simple (the picture of its
calibration bends), which no spread of its coefficients says.

    python examples/logistic_regression.py --data covtype.npz
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import datasets
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from show import (
    check_calibration,
    describe_temperature,
    parse,
    replicate,
    sample,
    trace_and_rank,
)

COLUMNS = (
    "intercept",
    "elevation",
    "aspect",
    "slope",
    "to water",
    "above water",
    "to road",
    "shade at 9",
    "shade at noon",
    "shade at 3",
    "to fire points",
)


def model(x: jax.Array, y: jax.Array | None = None, *, batch_size: int) -> None:
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("patches", len(x), subsample_size=batch_size):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("pine", dist.Bernoulli(logits=xb @ w), obs=yb)


def made_up(rows: int) -> tuple[jax.Array, jax.Array]:
    """Data of the same shape."""
    rng = np.random.default_rng(0)
    x = np.concatenate([np.ones((rows, 1)), rng.standard_normal((rows, 10))], 1)
    y = x @ np.linspace(-1, 1, 11) + rng.logistic(size=rows) > 0
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def show_pines(
    model: Callable,
    args: argparse.Namespace,
    names: dict[str, object],
    **settings: object,
) -> None:
    """Sample a model of the pines; ``names`` say which sites ArviZ is to draw."""
    if args.smoke:
        x, y = made_up(500)
        args.batch_size = 100
    else:
        x, y = map(jnp.asarray, datasets.covtype(args.data))
    this = partial(model, batch_size=args.batch_size)
    mcmc = sample(this, args, x, y, **settings)
    trace_and_rank(mcmc, args.out, **names)
    some = slice(None, None, max(1, len(y) // 20_000))
    check_calibration(
        np.asarray(y[some]),
        replicate(this, mcmc, x[some], site="pine"),
        f"Calibration ({describe_temperature(mcmc)})",
        f"{args.out}_predictive.png",
    )


def main() -> None:
    args = parse(__doc__, "logistic_regression", order=2).parse_args()
    show_pines(model, args, {"columns": COLUMNS})


if __name__ == "__main__":
    main()
