r"""
TunaMH, the exact mini-batch sampler of Zhang, Cooper and De Sa (2020), written small.

With potentials :math:`U_i` of the rows and a bound
:math:`|U_i(\theta') - U_i(\theta)| \le c_i M` for :math:`M = |\theta' - \theta|`, a
step draws a Poisson number of rows, more of them the longer the step, thins them, and
accepts a random-walk move by what is left, such that the posterior itself is invariant.
``chi`` trades rows for acceptance. The bounds of a model have to be known:

- logistic regression: :math:`c_i = |x_i|`;
- Student-t errors: :math:`c_i = |x_i| (\nu + 1) / (2 \sqrt\nu)`.

    python benchmarks/tuna.py   # beside the exact posterior, on little data
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

_CHUNK = 512


class Tuna(NamedTuple):
    """A posterior with bounds, and how to move in it."""

    log_prior: Callable[[jax.Array], jax.Array]
    log_likelihood: Callable[[jax.Array, tuple], jax.Array]
    """θ and some rows to a value for each row."""
    data: tuple
    bounds: jax.Array
    """c_i"""
    shape: jax.Array
    """A with moves A z of standard Gaussian z."""
    chi: float


def make_step(tuna: Tuna) -> Callable:
    """From key and θ to θ, whether moved, and how many rows were looked at."""
    log_prior, log_likelihood, data, bounds, shape, chi = tuna
    cumulated = jnp.asarray(np.cumsum(np.asarray(bounds, np.float64)), jnp.float32)
    total = cumulated[-1]

    def step(key: jax.Array, theta: jax.Array) -> tuple[jax.Array, ...]:
        key_move, key_count, key_rows, key_accept = random.split(key, 4)
        new = theta + shape @ random.normal(key_move, theta.shape)
        length = jnp.linalg.norm(new - theta)
        extra = chi * total * length  # lambda / (C M)
        count = random.poisson(key_count, total * length * (1 + extra))

        def more(carry: tuple) -> tuple:
            done, log_ratio = carry
            keys = random.split(random.fold_in(key_rows, done))
            place = random.uniform(keys[0], (_CHUNK,)) * total
            rows = jnp.minimum(jnp.searchsorted(cumulated, place), len(bounds) - 1)
            some = tuple(array[rows] for array in data)
            # U_i(θ') - U_i(θ), in units of its bound
            gap = log_likelihood(theta, some) - log_likelihood(new, some)
            gap = gap / (bounds[rows] * length)
            kept = random.uniform(keys[1], (_CHUNK,)) * (1 + extra) < (
                extra + (gap + 1) / 2
            )
            kept &= done + jnp.arange(_CHUNK) < count
            terms = -2 * jnp.arctanh(gap / (1 + 2 * extra))
            return done + _CHUNK, log_ratio + jnp.sum(jnp.where(kept, terms, 0.0))

        start = jnp.zeros((), jnp.int32), log_prior(new) - log_prior(theta)
        _, log_ratio = lax.while_loop(lambda carry: carry[0] < count, more, start)
        moved = jnp.log(random.uniform(key_accept)) < log_ratio
        return jnp.where(moved, new, theta), moved, count

    return step


def logistic_bounds(x: jax.Array) -> jax.Array:
    return jnp.linalg.norm(x, axis=1)


def student_bounds(x: jax.Array, dof: float) -> jax.Array:
    return jnp.linalg.norm(x, axis=1) * (dof + 1) / (2 * dof**0.5)


def main() -> None:
    """Posterior of a slope on 20 rows, by quadrature and by TunaMH."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((20, 1)), jnp.float32)
    y = jnp.asarray(rng.random(20) < 0.6, jnp.float32)

    def log_prior(w: jax.Array) -> jax.Array:
        return -jnp.sum(w**2) / 2

    def log_likelihood(w: jax.Array, rows: tuple) -> jax.Array:
        logit = rows[0] @ w
        return rows[1] * logit - jax.nn.softplus(logit)

    grid = jnp.linspace(-5, 5, 4001)[:, None]
    log_p = jax.vmap(lambda w: log_prior(w) + log_likelihood(w, (x, y)).sum())(grid)
    weights = jax.nn.softmax(log_p)
    mean = float(weights @ grid[:, 0])
    sd = float(jnp.sqrt(weights @ (grid[:, 0] - mean) ** 2))
    for chi in (0.0, 0.01, 0.3):
        tuna = Tuna(
            log_prior, log_likelihood, (x, y), logistic_bounds(x), jnp.eye(1), chi
        )
        step = make_step(tuna)

        def run(key: jax.Array, step: Callable = step) -> tuple:
            def one(w: jax.Array, key: jax.Array) -> tuple:
                w, moved, count = step(key, w)
                return w, (w[0], moved, count)

            return lax.scan(one, jnp.zeros(1), random.split(key, 20_000))[1]

        w, moved, count = jax.jit(jax.vmap(run))(random.split(random.key(0), 16))
        by_chain = np.asarray(w)[:, 1000:].mean(1)
        error = by_chain.std(ddof=1) / 4
        print(
            f"chi = {chi}: mean {by_chain.mean():.3f} ± {error:.3f} "
            f"(exact {mean:.3f}), sd {np.asarray(w)[:, 1000:].std():.3f} "
            f"(exact {sd:.3f}), acceptance {float(moved.mean()):.2f}, "
            f"{float(count.mean()):.0f} rows a step"
        )


if __name__ == "__main__":
    main()
