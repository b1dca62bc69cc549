"""
MNIST with one hidden layer of 600 units: MHBT as a trainer, beside SGD and SGLD.

Table 1 and Figure 3 of the paper, and what an average over epochs predicts. How MHBT
runs is said in ``training.py``. The paper's size is ``--epochs 500 --rounds 30``; its
script has ``--loss binary --bias-scale 1``, or perhaps ``--loss clipped``.

    python examples/mnist.py --data mnist.npz
"""

from __future__ import annotations

import datasets
from flax import linen as nn
import jax
import jax.numpy as jnp
from training import Task, arguments, compare, made_up

RATES = (0.01, 0.02, 0.05, 0.08, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
ROWS = 55_000  # those that the paper trains with
SCALE = 0.03  # standard deviation of the first weights


class Network(nn.Module):
    """784-600-10 with ReLU."""

    hidden: int = 600

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(10)(nn.relu(nn.Dense(self.hidden)(x)))


def main() -> None:
    parser = arguments(__doc__, "mnist", RATES)
    parser.add_argument("--hidden", type=int, default=600)
    parser.add_argument("--bias-scale", type=float, default=SCALE)
    args = parser.parse_args()
    if args.smoke:
        args.epochs, args.hidden, args.batch_size, args.c_n = 2, 8, 20, 20.0
        args.rates = [0.1]
    found = made_up(784) if args.smoke else datasets.mnist(args.data)
    x, y, x_test, y_test = map(jnp.asarray, found)
    task = Task(
        Network(args.hidden),
        (x[:ROWS], y[:ROWS]),
        (x_test, y_test),
        SCALE,
        args.bias_scale,
        args.loss,
        args.batch_size,
    )
    compare(task, args)


if __name__ == "__main__":
    main()
