"""
A small network: where lodgepole pines grow, with one hidden layer.

The data of ``logistic_regression.py``, and 12 hidden units (157 weights). The posterior
of a network is far from its Gaussian limit, and swapping two units changes nothing: no
expansion serves, so the kernel runs hot, at the coldest temperature that the noise of
batches of 1000 rows allows: as if the data had T times fewer rows. The prior is not
tempered (``temper_prior=False``), since that alone holds weights that so few rows do
not determine. Single weights wander between equivalent places, so that their R-hat says
little; what the network predicts says more.

    python examples/small_network.py --data covtype.npz
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from logistic_regression import show_pines
import numpyro
import numpyro.distributions as dist
from show import parse

HIDDEN = 12


def model(x: jax.Array, y: jax.Array | None = None, *, batch_size: int) -> None:
    first = dist.Normal(0, 1).expand([x.shape[1], HIDDEN]).to_event(2)
    w_in = numpyro.sample("w_in", first)
    w_out = numpyro.sample("w_out", dist.Normal(0, 1).expand([HIDDEN]).to_event(1))
    bias = numpyro.sample("bias", dist.Normal(0, 1))
    with numpyro.plate("patches", len(x), subsample_size=batch_size):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        logits = jnp.tanh(xb @ w_in) @ w_out + bias
        numpyro.sample("pine", dist.Bernoulli(logits=logits), obs=yb)


def main() -> None:
    args = parse(__doc__, "small_network", order=0).parse_args()
    show_pines(model, args, temper_prior=False, var_names=["bias", "w_out"])


if __name__ == "__main__":
    main()
