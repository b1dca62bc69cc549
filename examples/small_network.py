"""
A small network: where lodgepole pines grow, with one hidden layer.

The data of ``logistic_regression.py``, and 12 hidden units (145 weights). The posterior
of a network is far from its Gaussian limit, and swapping two units changes nothing: no
expansion serves, so the kernel runs hot, as if there were ``--c-n`` rows. Batches of
5000 would be too noisy for 500; with ``num_blocks=20`` only a twentieth of a batch is
new in each step, and so is its noise. The prior is not tempered
(``temper_prior=False``), since that alone holds weights that so few rows do not
determine.

Each chain has its own order of the units, so that R-hat of single weights is large and
says little. What the network predicts for four patches (``logit``) is to agree.

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

    def logits(x: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w_in) @ w_out + bias

    with numpyro.plate("patches", len(x), subsample_size=batch_size):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("pine", dist.Bernoulli(logits=logits(xb)), obs=yb)
    numpyro.deterministic("logit", logits(x[:: len(x) // 4][:4]))


def main() -> None:
    parser = parse(__doc__, "small_network", order=0)
    parser.add_argument("--c-n", type=float, default=500.0)
    parser.set_defaults(batch_size=5000, num_samples=2000)
    args = parser.parse_args()
    if args.smoke:
        args.c_n = 20.0
    names = {"var_names": ["bias", "logit"]}
    settings = {"c_n": args.c_n, "num_blocks": 20, "temper_prior": False}
    show_pines(model, args, names, **settings)


if __name__ == "__main__":
    main()
