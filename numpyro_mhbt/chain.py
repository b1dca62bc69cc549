"""One chain: its start, its next draw, and what warm-up makes of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax import lax, random
from jax.custom_batching import custom_vmap
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp

from numpyro_mhbt.adaptation import Adapter, WarmupState
from numpyro_mhbt.beta import first_beta, forward_acceptance, next_beta
from numpyro_mhbt.checks import finite_sites
from numpyro_mhbt.disk import fetch, reads_ahead
from numpyro_mhbt.keys import quick
from numpyro_mhbt.mesh import own_key, own_share
from numpyro_mhbt.plates import Batch, draw_batch, is_subsampled, next_batch
from numpyro_mhbt.proposals import BetaSchedule, Knobs
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.setup import climb, initial_params
from numpyro_mhbt.state import (
    MHBTState,
    Setup,
    Shared,
    from_point,
    to_point,
    unraveller,
)
from numpyro_mhbt.step import Info, Point, Walk, is_forgotten, step
from numpyro_mhbt.target import Data, make_evaluate, shows_noise, site_log_probs
from numpyro_mhbt.vectors import Blocks, flatten, is_long

_MEMORY = 30
_PAIR_EVERY = 50
_LONGEST = 2**16  # draws of a running mean, whose steps must not be lost to rounding
_CLIMB_STEPS = 300
_SILENT = 1e-30  # stands for no noise at all on a logarithmic scale
_RECENT = 100  # draws of warm-up that tell how often a proposal has no value now
_ASTRAY = 0.5  # of the rate aimed at, for a move that leads where there is no value
_LAST = 2**31 - 1  # number of a draw; more do not fit, and warm-up must not come again


def evaluator(
    settings: Settings,
    data: Data,
    unravel: Callable,
    temperature: jax.Array,
    shared: Shared,
) -> Callable[..., Point]:
    """θ and batch to :class:`Point`."""
    return make_evaluate(
        settings.model,
        data._replace(params=shared.params),
        unravel,
        temperature,
        shared.reference,
        bias_correction=settings.bias_correction,
        temper_prior=settings.temper_prior,
        gradient=settings.proposal.uses_gradient,
    )


def start(
    data: Data,
    setup: Setup,
    rng_key: jax.Array,
    init_params: dict[str, Any] | None,
    *,
    settings: Settings,
    num_warmup: int,
) -> tuple[MHBTState, dict[str, jax.Array], dict[str, jax.Array]]:
    """
    The initial state of a chain, whether each site has a density there, and whether
    the gradient by each latent site is finite.
    """
    rng_key, key_batch, key_init = random.split(rng_key, 3)
    data = data._replace(params=setup.shared.params)
    batch = draw_batch(own_key(data, key_batch), data.plates)
    if init_params is not None:
        z = jax.tree.map(lambda x, y: jnp.asarray(y, x.dtype), setup.z, init_params)
        flat, _ = ravel_pytree(z)
    else:
        flat = _first_point(key_init, settings, data, setup, batch, num_warmup)
    unravel = unraveller(setup.z)
    number = partial(jnp.asarray, dtype=flat.dtype)
    temperature = number(setup.temperature)
    # A mass matrix is adapted to one flat vector.
    blocks = is_long(setup.z) and not settings.adapt_mass_matrix
    vector = Blocks(unravel(flat)) if blocks else flat
    point = evaluator(settings, data, unravel, temperature, setup.shared)(vector, batch)
    none_yet = jnp.zeros((), jnp.int32)
    schedule = settings.step_size_schedule
    step_size = schedule(none_yet) if schedule else settings.proposal.step_size
    adapter = Adapter(num_warmup, settings, setup.spread is not None)
    adapt_state = adapter.init(
        flat, number(step_size), setup.spread, data.num_rows / temperature
    )
    state = MHBTState(
        i=none_yet,
        **from_point(point, unravel),
        accept_prob=number(0),
        mean_accept_prob=number(0),
        mean_diverging=number(0),
        mean_noise_variance=number(0 if shows_noise(data.plates) else jnp.nan),
        accepted=none_yet,
        diverging=jnp.zeros((), bool),
        forward=none_yet,
        temperature=temperature,
        step_size=adapt_state.step_size,
        beta=number(settings.proposal.beta or 1.0),
        epoch_accept_prob=number(0),
        adapt_state=adapt_state,
        shared=setup.shared,
        rng_key=rng_key,
    )
    plan = settings.proposal.beta_schedule
    if plan is not None and settings.proposal.beta is None:
        probe = _prober(rng_key, plan, state, settings, data)
        state = state._replace(beta=number(first_beta(plan, probe)))
    log_probs, _ = site_log_probs(settings.model, data, unravel(flat), batch)
    slopes = finite_sites(data, unravel(point.grad))
    return state, finite_sites(data, log_probs), slopes


def _first_point(
    rng_key: jax.Array,
    settings: Settings,
    data: Data,
    setup: Setup,
    batch: Batch,
    num_warmup: int,
) -> jax.Array:
    reference, spread = setup.shared.reference, setup.spread
    key_init, key_climb = random.split(rng_key)
    flat, unravel = ravel_pytree(setup.z)
    temperature = setup.temperature.astype(flat.dtype)
    evaluate = evaluator(settings, data, unravel, temperature, setup.shared)

    def if_safe(z: jax.Array, otherwise: jax.Array) -> jax.Array:
        there = evaluate(z, batch)
        safe = jnp.isfinite(there.value) & jnp.all(jnp.isfinite(there.grad))
        return jnp.where(safe, z, otherwise)

    if settings.init_strategy is None and spread is not None:
        expanded = reference if reference and reference.grad is not None else None
        if expanded:
            # An expansion is no good far away. Twice as wide as the posterior, since
            # R-hat trusts only chains that came from further out.
            unit = random.normal(key_init, expanded.z.shape, expanded.z.dtype)
            return if_safe(expanded.z + 2 * spread @ unit, expanded.z)
    z = initial_params(key_init, settings, data, batch)
    flat = ravel_pytree(z)[0]
    if settings.init_strategy is None and num_warmup and is_subsampled(data.plates):
        # Far out the noise of batches is so loud that hardly a step is accepted. Each
        # chain climbs on its own, so that several modes are still found.
        top = climb(key_climb, z, settings, data, temperature, _CLIMB_STEPS)
        # A climb can end beyond what floats can hold.
        return if_safe(top, flat)
    return flat


def next_draw(
    state: MHBTState, *, settings: Settings, data: Data, i: jax.Array
) -> tuple[MHBTState, jax.Array]:
    """
    ``steps_per_draw`` steps of Algorithm 1, and the acceptance rate to tune by.

    :param i: number of this draw, alike in all chains so that branches stay branches.
    """
    key, usual = quick(state.rng_key)
    state = _follow_schedules(state, settings)._replace(rng_key=key)
    point, unravel = to_point(state)
    evaluate = evaluator(settings, data, unravel, state.temperature, state.shared)
    if settings.temperature_schedule is not None:
        # What is known of the point was known at another temperature.
        now = evaluate(point.z, point.batch)
        forgotten = is_forgotten(point)
        point = now._replace(value=jnp.where(forgotten, point.value, now.value))
    rng_key, key_steps = random.split(state.rng_key)
    num_warmup = state.adapt_state.num_warmup
    warmup = i <= num_warmup
    since = jnp.where(warmup, i, i - num_warmup)
    # Afterwards a pair now and then, to know the noise.
    pair = warmup | (since % _PAIR_EVERY == 1)
    one_step = partial(
        step,
        walk=_walk(state, settings, data, evaluate),
        refresh=settings.on_reject == "refresh",
        pair=pair,
    )
    # With blocks the next batch depends on whether this one is accepted.
    ahead = settings.num_blocks == 1 and reads_ahead(data)
    next_key = random.split(rng_key)[1] if ahead else None
    if settings.steps_per_draw == 1:
        point, infos = one_step(key_steps, point, next_key=next_key)
        info = infos
    else:
        keys = random.split(key_steps, settings.steps_per_draw)
        next_keys = None
        if next_key is not None:
            later = random.split(next_key, settings.steps_per_draw)
            next_keys = jnp.concatenate([keys[1:], later[:1]])
        point, infos = lax.scan(
            lambda point, keys: one_step(keys[0], point, next_key=keys[1]),
            point,
            (keys, next_keys),
        )
        info = Info(
            jnp.mean(infos.accept_prob),
            jnp.sum(infos.accepted, dtype=jnp.int32),
            jnp.any(infos.diverging),
            infos.forward[-1],
            jnp.exp(jnp.mean(jnp.log(infos.fresh_noise + _SILENT))),
            jnp.mean(infos.paired_accept_prob),
        )
    astray = jnp.mean(infos.diverging.astype(info.accept_prob.dtype))
    recent = jnp.where(warmup, jnp.minimum(since, _RECENT), since)
    num_pairs = jnp.where(warmup, jnp.minimum(since, _MEMORY), since // _PAIR_EVERY + 1)
    noise = _geometric_mean(state.mean_noise_variance, info.fresh_noise, num_pairs)
    state = state._replace(
        i=following(state.i),
        **from_point(point, unravel),
        accept_prob=info.accept_prob,
        mean_accept_prob=_mean(state.mean_accept_prob, info.accept_prob, since),
        mean_diverging=_mean(state.mean_diverging, astray, recent),
        mean_noise_variance=jnp.where(pair, noise, state.mean_noise_variance),
        accepted=info.accepted,
        diverging=info.diverging,
        forward=info.forward,
        rng_key=rng_key,
    )
    if settings.proposal.beta_schedule is not None:
        state = _follow_beta(settings.proposal.beta_schedule, state, settings, data, i)
    state = state._replace(rng_key=usual(state.rng_key))
    return state, jnp.mean(_rate_to_tune_by(infos, settings))


def following(i: jax.Array) -> jax.Array:
    return jnp.minimum(i, _LAST - 1) + 1


@custom_vmap
def of_all_chains(value: jax.Array) -> jax.Array:
    """What all chains have alike, or that of the first: the same under ``vmap``."""
    return value


@of_all_chains.def_vmap
def _(
    axis_size: int, in_batched: list[bool], value: jax.Array
) -> tuple[jax.Array, bool]:
    return value[0], False


def _rate_to_tune_by(info: Info, settings: Settings) -> jax.Array:
    """
    The acceptance rate without mini-batch noise, and without much of what diverges.

    At the edge of a region without density half of all moves end there, however short
    they are. Steps that shrink until nearly all others are accepted would never leave,
    so a move that diverges counts for part of the rate aimed at; not for all of it,
    since steps too long for floating-point numbers must shrink. (A walk aims at 0.3,
    well below that half, and is the better for it.)
    """
    share = _ASTRAY if settings.proposal.uses_gradient else 0.0
    otherwise = share * settings.target_accept_prob
    rate = jnp.where(info.diverging, otherwise, info.paired_accept_prob)
    # A look at the current point teaches nothing of moves.
    return jnp.where(info.forward < 0, settings.target_accept_prob, rate)


def _walk(state: MHBTState, settings: Settings, data: Data, evaluate: Callable) -> Walk:
    c_n = data.num_rows / state.temperature
    mass_sqrt_inv = state.adapt_state.mass_matrix_sqrt_inv
    if not settings.adapt_mass_matrix:
        # All ones, which cost a pass over long vectors each time.
        mass_sqrt_inv = jnp.ones((), mass_sqrt_inv.dtype)

    def own(key: jax.Array) -> jax.Array:
        return own_key(data, of_all_chains(key) if settings.share_batches else key)

    def draw(key: jax.Array, batch: Batch) -> Batch:
        return next_batch(own(key), batch, data.plates, settings.num_blocks)

    def fetch_batch(batch: Batch, next_key: jax.Array | None) -> Data:
        on = data._replace(params=state.shared.params)
        if next_key is None:
            return fetch(on, batch)
        return fetch(on, batch, draw_batch(own(next_key), data.plates))

    return Walk(
        draw,
        evaluate,
        settings.proposal,
        Knobs(state.step_size, state.beta, c_n, data.num_rows),
        mass_sqrt_inv,
        fetch_batch,
    )


def _follow_beta(
    plan: BetaSchedule,
    state: MHBTState,
    settings: Settings,
    data: Data,
    i: jax.Array,
) -> MHBTState:
    """β after the ``i``-th draw, which may be the last of an epoch."""
    m = sum(plate.subsample_size for plate in data.plates) or data.num_rows
    steps = plan.steps_per_epoch or data.num_rows * own_share(data) / m
    draws = max(round(steps / settings.steps_per_draw), 1)
    position = (i - 1) % draws + 1
    rate = _mean(state.epoch_accept_prob, state.accept_prob, position)
    state = state._replace(epoch_accept_prob=rate)
    refresh = settings.on_reject == "refresh"
    if refresh:
        # Of the steps; a rejected move took a second one, to look at where it began.
        rate = 2 * rate / (1 + rate)

    def new_epoch() -> tuple[jax.Array, jax.Array]:
        rng_key, key_probe = random.split(state.rng_key)
        known = (
            evaluate_again(state, settings=settings, data=data) if refresh else state
        )
        probe = _prober(key_probe, plan, known, settings, data)
        return rng_key, next_beta(plan, state.beta, rate, probe)

    rng_key, beta = lax.cond(
        position == draws, new_epoch, lambda: (state.rng_key, state.beta)
    )
    return state._replace(rng_key=rng_key, beta=beta)


def _prober(
    rng_key: jax.Array,
    plan: BetaSchedule,
    state: MHBTState,
    settings: Settings,
    data: Data,
) -> Callable[[jax.Array], jax.Array]:
    """From values of β to acceptance rates of forward moves from the present point."""
    point, unravel = to_point(state)
    evaluate = evaluator(settings, data, unravel, state.temperature, state.shared)
    walk = _walk(state, settings, data, evaluate)
    return partial(forward_acceptance, rng_key, point, walk, plan.num_probes)


def evaluate_again(state: MHBTState, *, settings: Settings, data: Data) -> MHBTState:
    """The state with what is known of its point at its temperature and these data."""
    point, unravel = to_point(state)
    at = evaluator(settings, data, unravel, state.temperature, state.shared)
    return state._replace(**from_point(at(point.z, point.batch), unravel))


def _follow_schedules(state: MHBTState, settings: Settings) -> MHBTState:
    schedules = {
        "temperature": settings.temperature_schedule,
        "step_size": settings.step_size_schedule,
    }
    dtype = state.log_density.dtype
    values: dict[str, Any] = {
        name: jnp.asarray(schedule(state.i), dtype)
        for name, schedule in schedules.items()
        if schedule is not None
    }
    return state._replace(**values)


def _mean(mean: jax.Array, value: jax.Array, count: jax.Array) -> jax.Array:
    return mean + (value - mean) / jnp.minimum(count, _LONGEST)


def _geometric_mean(mean: jax.Array, value: jax.Array, count: jax.Array) -> jax.Array:
    """
    Running mean on a logarithmic scale.

    The noise is larger by orders of magnitude before the chain has found the mode.
    """
    new = jnp.exp(_mean(jnp.log(mean + _SILENT), jnp.log(value + _SILENT), count))
    return jnp.where(jnp.isfinite(value), new, mean)


def adapt(
    state: MHBTState,
    paired_accept_prob: jax.Array,
    *,
    settings: Settings,
    num_rows: float,
) -> WarmupState:
    """What a draw of warm-up teaches."""
    so_far = state.adapt_state
    return Adapter(so_far.num_warmup, settings, so_far.unit.ndim == 2).update(
        state.i - 1,
        paired_accept_prob,
        flatten(state.z),
        num_rows / state.temperature,
        so_far,
    )
