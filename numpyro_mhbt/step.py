"""Algorithm 1 of the paper: one Metropolis-Hastings step on the pair (θ, batch)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
from jax import lax, random
import jax.numpy as jnp

from numpyro_mhbt.plates import Batch
from numpyro_mhbt.proposals import Knobs, Move, Proposal
from numpyro_mhbt.vectors import Vector, few


class Point(NamedTuple):
    """A point (θ, I) of the augmented space, and what is known there."""

    z: Vector
    """θ, unconstrained."""
    batch: Batch
    """I"""
    value: jax.Array
    """L_I(θ), the tempered log-density on the batch I."""
    grad: Vector
    """∇L_I(θ); zero where the proposal does not use it."""
    potential_energy: jax.Array
    noise_variance: jax.Array


class Info(NamedTuple):
    """What happened in a step."""

    accept_prob: jax.Array
    accepted: jax.Array
    diverging: jax.Array
    forward: jax.Array
    fresh_noise: jax.Array
    """Noise variance of the current θ on the fresh batch. The chain lingers on batches
    that flatter it, so that on its own batch is no fair sample. Only if ``pair``."""
    paired_accept_prob: jax.Array
    """Of the move if both points had the fresh batch, where most noise cancels: what to
    tune by. Only if ``pair``."""


class Walk(NamedTuple):
    """How a chain moves."""

    draw: Callable[[jax.Array, Batch], Batch]
    """Key and current batch to a batch, the way back as likely."""
    evaluate: Callable[..., Point]
    """θ, batch and what was fetched of it to a point."""
    proposal: Proposal
    knobs: Knobs
    mass_sqrt_inv: jax.Array
    """W with inverse mass matrix W' W (diagonal: a vector, or a number)."""
    fetch: Callable[[Batch, jax.Array | None], Any] = lambda batch, next_key: None
    """Batch, and the key of the next one if known, to what is on disk of it."""


def step(
    rng_key: jax.Array,
    point: Point,
    walk: Walk,
    refresh: bool,
    pair: jax.Array,
    next_key: jax.Array | None = None,
) -> tuple[Point, Info]:
    """
    Propose θ' with the gradient of the current batch and a fresh batch I', and accept
    both or neither with probability

        min{1, q_I'(θ' → θ) exp L_I'(θ') / (q_I(θ → θ') exp L_I(θ))}.

    The value and gradient of the current point belong to *its* batch and are kept: to
    draw them anew after a rejection (``refresh``) is another chain with another target.
    There a rejected move leaves a point whose value is forgotten, and the next step is
    a look at it on the next batch, which goes nowhere.

    :param refresh: whether to forget the value of the current point after a rejection.
    :param pair: whether to look at the current θ on the new batch, too.
    :param next_key: ``rng_key`` of the next step, where data are read ahead.
    """
    draw, evaluate, proposal, knobs, mass_sqrt_inv, fetch = walk
    key_move, key_batch, key_accept = random.split(rng_key, 3)
    grad = whiten(mass_sqrt_inv, point.grad)
    looks = is_forgotten(point) if refresh else jnp.array(False)

    def moves() -> Move:
        return proposal.draw(key_move, grad, knobs)

    # What a branch returns is copied: of long vectors, as little as can be.
    move = lax.cond(looks, lambda: _nothing(moves), moves)
    displacement = proposal.displacement(move, grad, knobs)
    z = _either(looks, point.z, point.z + unwhiten(mass_sqrt_inv, displacement))
    batch = draw(key_batch, point.batch)
    read = fetch(batch, None if next_key is None else random.split(next_key, 3)[1])
    new = evaluate(z, batch, read)

    def back_and_there() -> jax.Array:
        new_grad = whiten(mass_sqrt_inv, new.grad)
        return proposal.log_ratio(move, grad, new_grad, knobs)

    densities = lax.cond(looks, lambda: _nothing(back_and_there), back_and_there)
    log_ratio = new.value - point.value + densities
    diverging = ~jnp.isfinite(new.value) | jnp.isnan(log_ratio)
    log_ratio = jnp.where(diverging, -jnp.inf, log_ratio)
    accepted = jnp.log(random.uniform(key_accept, dtype=log_ratio.dtype)) < log_ratio

    def values(at: Point) -> tuple[jax.Array, jax.Array]:
        return at.value, at.noise_variance

    value, noise = lax.cond(
        pair,
        lambda: values(evaluate(point.z, batch, read)),
        lambda: values(point),
    )
    # A step lost to rounding leads nowhere, however surely it is taken: a chain of such
    # steps must look stuck, and steps must not be tuned to that length.
    moved = jnp.any(few(new.z) != few(point.z))
    info = Info(
        jnp.where(moved, accept_prob(log_ratio), 0.0),
        (accepted & ~looks).astype(jnp.int32),
        diverging,
        jnp.where(looks, -1, move.forward.astype(jnp.int32)),
        noise,
        jnp.where(moved, accept_prob(log_ratio + point.value - value), 0.0),
    )
    forgotten = jnp.full_like(point.value, -jnp.inf)
    kept = point._replace(value=forgotten, grad=new.grad) if refresh else point
    return _either(accepted, new, kept), info


def is_forgotten(point: Point) -> jax.Array:
    """Whether the next step is to look at the point instead of moving on."""
    return point.value == -jnp.inf


def _either(condition: jax.Array, one: Any, other: Any) -> Any:
    return jax.tree.map(partial(jnp.where, condition), one, other)


def _nothing(make: Callable) -> Any:
    """Zeros in place of what ``make`` returns."""
    return jax.tree.map(jnp.zeros_like, jax.eval_shape(make))


def accept_prob(log_ratio: jax.Array) -> jax.Array:
    return jnp.where(jnp.isnan(log_ratio), 0.0, jnp.exp(jnp.minimum(log_ratio, 0.0)))


def whiten(mass_sqrt_inv: jax.Array, grad: Vector) -> Vector:
    return mass_sqrt_inv @ grad if mass_sqrt_inv.ndim == 2 else mass_sqrt_inv * grad


def unwhiten(mass_sqrt_inv: jax.Array, move: Vector) -> Vector:
    return whiten(mass_sqrt_inv.T, move)
