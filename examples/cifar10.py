"""
CIFAR-10 with a network of three convolutions: MHBT as a trainer, beside SGD and SGLD.

Table 2 of the paper. How MHBT runs is said in ``training.py``. The paper's size is
``--epochs 200 --rounds 20`` (10^5 steps) on all 50000 images.

    python examples/cifar10.py --data cifar10.npz
"""

from __future__ import annotations

import datasets
from flax import linen as nn
import jax
from jax import lax, random
import jax.numpy as jnp
from training import Task, arguments, compare, first_weights, made_up

RATES = (0.005, 0.008, 0.02, 0.04)
SCALE = 0.02  # standard deviation of the first weights


def local_response(
    x: jax.Array, radius: int = 3, bias: float = 1.0, alpha: float = 5e-5
) -> jax.Array:
    """Each channel by the power of its neighbours, to the power 0.75."""
    window = (1, 1, 1, 2 * radius + 1)
    power = lax.reduce_window(x**2, 0.0, lax.add, window, (1, 1, 1, 1), "SAME")
    return x / (bias + alpha * power) ** 0.75


def neighbours(x: jax.Array, radius: int = 2) -> jax.Array:
    """
    The channels of each pixel and of those around it, side by side.

    A dense layer of these is a convolution; on a CPU that of XLA is some twenty times
    slower inside a loop.
    """
    height, width = x.shape[1:3]
    x = jnp.pad(x, ((0, 0), (radius, radius), (radius, radius), (0, 0)))
    shifts = range(2 * radius + 1)
    near = [x[:, i : i + height, j : j + width] for i in shifts for j in shifts]
    return jnp.concatenate(near, -1)


class Network(nn.Module):
    """Blocks of 5 x 5 convolution, ReLU, pooling and normalisation; then classes."""

    channels: tuple[int, ...] = (32, 32, 64)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for channels in self.channels:
            x = nn.relu(nn.Dense(channels)(neighbours(x)))
            x = nn.max_pool(x, (3, 3), (2, 2), "SAME")
            x = local_response(x)
        return nn.Dense(10)(x.reshape(len(x), -1))


def main() -> None:
    parser = arguments(__doc__, "cifar10", RATES)
    parser.add_argument("--rows", type=int, help="images to train with; else all")
    args = parser.parse_args()
    net = Network()
    if args.smoke:
        args.epochs, args.batch_size, args.c_n, args.rates = 2, 20, 20.0, [0.02]
        net = Network((4, 4, 4))
    found = made_up(32, 32, 3) if args.smoke else datasets.cifar10(args.data)
    x, y, x_test, y_test = map(jnp.asarray, found)
    task = Task(
        net,
        (x[: args.rows], y[: args.rows]),
        (x_test, y_test),
        SCALE,
        SCALE,
        args.loss,
        args.batch_size,
    )
    shapes = jax.eval_shape(lambda: first_weights(random.key(0), task))
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    print(f"{count} weights; the paper says about 4e6 of the same layers")
    compare(task, args)


if __name__ == "__main__":
    main()
