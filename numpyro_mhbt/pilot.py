"""A short run that finds T where no Gaussian approximation does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_mhbt.chain import adapt, evaluate_again, next_draw, start
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.state import MHBTState, Setup
from numpyro_mhbt.target import Data

_STEPS = 1000


def settle(
    data: Data, setup: Setup, modes: jax.Array, *, settings: Settings
) -> jax.Array:
    """
    T at which chains from ``modes`` see noise near the target (Robbins and Monro).

    The noise grows with c_n = n / T, so c_n follows it down and up in ever smaller
    steps, while the chains adapt as in warm-up.

    :param setup: with the temperature to begin at.
    """
    settings = replace(settings, steps_per_draw=1)
    n, unravel = data.num_rows, ravel_pytree(setup.z)[1]
    begin = partial(start, data, setup, settings=settings, num_warmup=_STEPS)
    keys = random.split(random.key(0), len(modes))
    chains, *_ = jax.vmap(lambda key, z: begin(key, unravel(z)))(keys, modes)

    def advance(
        carry: tuple[MHBTState, jax.Array], i: jax.Array
    ) -> tuple[tuple[MHBTState, jax.Array], jax.Array]:
        chains, log_t = carry

        def one(chain: MHBTState) -> MHBTState:
            chain = chain._replace(temperature=jnp.exp(log_t))
            chain = evaluate_again(chain, settings=settings, data=data)
            chain, accept_prob = next_draw(chain, settings=settings, data=data, i=i)
            learnt = adapt(chain, accept_prob, settings=settings, num_rows=n)
            return chain._replace(adapt_state=learnt, step_size=learnt.step_size)

        chains = jax.vmap(one)(chains)
        noise = jnp.nan_to_num(jnp.mean(chains.mean_noise_variance), nan=jnp.inf)
        excess = jnp.log(noise / settings.target_noise)
        log_t += jnp.clip(excess, -1, 1) * 10 / (100 + i)
        log_t = jnp.clip(log_t, 0, jnp.log(n))
        return (chains, log_t), log_t

    log_t = jnp.log(chains.temperature[0])
    _, course = lax.scan(advance, (chains, log_t), jnp.arange(1, _STEPS + 1))
    # At most n, which rounding of the logarithm may exceed.
    return jnp.minimum(jnp.exp(jnp.mean(course[_STEPS // 2 :])), n)
