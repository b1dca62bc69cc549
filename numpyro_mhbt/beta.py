"""The course of β in training: the paper's rule, once an epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np

from numpyro_mhbt.proposals import RSGLD, BetaSchedule
from numpyro_mhbt.step import Point, Walk, accept_prob, unwhiten, whiten

_STARTS = np.geomspace(1, 1e4, 41)


def forward_acceptance(
    rng_key: jax.Array, point: Point, walk: Walk, num_probes: int, betas: jax.Array
) -> jax.Array:
    """Mean acceptance probability of forward moves from ``point``, at each β."""
    draw, evaluate, proposal, knobs, mass_sqrt_inv, _ = walk
    assert isinstance(proposal, RSGLD)
    forward = replace(proposal, forward_prob=1.0)
    grad = whiten(mass_sqrt_inv, point.grad)

    def probe(key: jax.Array) -> jax.Array:
        key_move, key_batch = random.split(key)
        move = forward.draw(key_move, grad, knobs)
        displacement = forward.displacement(move, grad, knobs)
        there = point.z + unwhiten(mass_sqrt_inv, displacement)
        new = evaluate(there, draw(key_batch, point.batch))
        new_grad = whiten(mass_sqrt_inv, new.grad)

        def accept(beta: jax.Array) -> jax.Array:
            at = knobs._replace(beta=beta)
            log_ratio = proposal.log_ratio(move, grad, new_grad, at)
            return accept_prob(new.value - point.value + log_ratio)

        return jax.vmap(accept)(betas)

    return jnp.mean(lax.map(probe, random.split(rng_key, num_probes)), axis=0)


def first_beta(schedule: BetaSchedule, acceptance: Callable) -> jax.Array:
    """
    A large β at which forward moves are accepted often enough, or most often.

    Not the smallest: the first steps lead where a larger one is needed, and there no
    move would be accepted. Ten times the smallest leaves room, and the schedule lowers
    what is too large.

    :param acceptance: from values of β to acceptance rates of forward moves.
    """
    betas = jnp.asarray(_STARTS)
    rates = acceptance(betas)
    often = rates >= jnp.minimum(schedule.probe_accept, jnp.max(rates))
    smallest = betas[jnp.argmax(often)]
    return jnp.max(jnp.where(often & (betas < 10.1 * smallest), betas, 1.0))


def next_beta(
    schedule: BetaSchedule,
    beta: jax.Array,
    accepted: jax.Array,
    acceptance: Callable,
) -> jax.Array:
    """
    β for the next epoch.

    :param accepted: share of accepted moves in the last one.
    """
    num_cuts = round(schedule.max_change / schedule.change)
    cuts = 1 - schedule.change * jnp.arange(num_cuts + 1, dtype=beta.dtype)

    def lower() -> jax.Array:
        enough = acceptance(beta * cuts) > schedule.probe_accept
        # As many cuts as there are steps before the first that goes too far.
        return beta * cuts[jnp.argmin(enough.at[-1].set(False))]

    def higher() -> jax.Array:
        return jnp.where(
            accepted < schedule.accept_low, beta * (1 + schedule.change), beta
        )

    return jnp.maximum(lax.cond(accepted > schedule.accept_high, lower, higher), 1.0)
