"""What speaks against a run: said when it begins, and while it goes on."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
import math

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from numpyro.util import not_jax_tracer

from numpyro_mhbt.adaptation import acceptance_ceiling
from numpyro_mhbt.advice import LOUD, is_near, nearer, quieter, too_hot
from numpyro_mhbt.mesh import is_first
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.state import MHBTState, Setup, Shared
from numpyro_mhbt.target import Data, fingerprint, shows_noise
from numpyro_mhbt.warn import warn

_STUCK = 0.005  # acceptance rate
_ASTRAY = 0.1  # of all proposals
_LARGE = 2**28  # bytes
_LOOK_AT = (1000, 10_000, 100_000)  # draws after warm-up


def warn_of_setup(settings: Settings, setup: Setup, hidden: Collection[str]) -> None:
    """Say what of the model and its expansion a user should know before sampling."""
    plates = setup.shared.plates
    if not plates:
        warn(
            "no plate of the model has a `subsample_size`, so each step uses all rows."
        )
    if hidden:
        warn(
            f"deterministic site(s) {sorted(hidden)} depend on the rows of the batch "
            "and are not collected. `Predictive(full_data(model), samples)` computes "
            "them for all rows."
        )
    if not shows_noise(plates):
        warn(
            "with `subsample_size=1` a batch does not show its own noise, so "
            "`noise_variance` is not known and the bias is not corrected."
        )
    heat = float(setup.temperature)
    for problem in expansion_problems(settings, setup.shared, heat):
        warn(problem)


def warn_of_state(
    settings: Settings, data: Data, i: jax.Array, state: MHBTState
) -> MHBTState:
    """
    Say what is wrong, if anything, at the end of warm-up and at times after it.

    :return: the state, which must be used, or nothing is said.
    """
    shared = state.shared
    num_warmup = state.adapt_state.num_warmup
    draws = i - num_warmup
    now = (draws == 0) & (num_warmup > 0)
    for count in _LOOK_AT:
        now |= draws == count
    now &= is_first(data)
    said = _say(
        state.i,
        now,
        partial(_look, settings),
        state.temperature,
        state.mean_noise_variance,
        state.mean_accept_prob,
        state.mean_diverging,
    )
    if shared.reference is not None and shared.reference.grad is not None:
        changed = lax.cond(
            draws % 100 == 1,
            lambda: jnp.any(fingerprint(data) != shared.fingerprint),
            lambda: jnp.array(False),
        )
        said = _say(said, changed & is_first(data), _complain_of_data)
    return state._replace(i=said)


def _say(i: jax.Array, now: jax.Array, what: Callable, *values: jax.Array) -> jax.Array:
    """
    ``i``, once ``what`` was called on the host if ``now``.

    Not by ``jax.debug.callback``: JAX calls programs with side effects by way of
    Python, which would take a millisecond for each draw under a progress bar.
    """

    def call(i: np.ndarray, now: np.ndarray, *values: np.ndarray) -> np.ndarray:
        # A branch that was mapped over chains cannot keep others from coming here.
        if np.all(now):
            what(*values)
        return i

    ask = partial(
        jax.pure_callback,
        call,
        jax.ShapeDtypeStruct(i.shape, i.dtype),
        vmap_method="broadcast_all",
    )
    return lax.cond(now, ask, lambda i, *_: i, i, now, *values)


def _complain_of_data() -> None:
    warn(
        "the run goes on with other data than those of the control variate's sums, so "
        "its draws belong to neither. Start anew: call `run` without "
        "`post_warmup_state`."
    )


def _look(
    settings: Settings,
    temperature: np.ndarray,
    noise_variance: np.ndarray,
    accept_prob: np.ndarray,
    diverging: np.ndarray,
) -> None:
    heat, noise = np.ravel(temperature)[0], np.median(noise_variance)
    accept = np.ravel(accept_prob)
    found = problems(settings, heat, noise, accept, float(np.mean(diverging)))
    for text in found or filter(None, [too_hot(settings, heat, noise)]):
        warn(text)


def hint_large_constants(data: Data) -> None:
    """Say how to keep large data out of the program that NumPyro compiles."""
    leaves = jax.tree.leaves((data.args, data.kwargs))
    size = sum(
        x.nbytes for x in leaves if isinstance(x, jax.Array) and not_jax_tracer(x)
    )
    if size > _LARGE:
        warn(
            f"{size / 2**20:.0f} MiB of data are compiled into the program as "
            "constants, which takes time and copies them. "
            "`MCMC(..., jit_model_args=True, progress_bar=False)` passes them as "
            "arguments instead (with a bar NumPyro copies arguments for each draw)."
        )


def problems(
    settings: Settings,
    temperature: float,
    noise: float,
    accept_prob: np.ndarray,
    diverging: float,
) -> list[str]:
    """
    What speaks against the draws, seen while a run goes on.

    A chain that never moves looks perfect to ArviZ (as many effective draws as draws,
    R-hat not a number), so it must be told here.

    :param noise: variance of the log-density on fresh batches.
    :param accept_prob: mean acceptance rate of each chain.
    :param diverging: share of all proposals.
    """
    found = []
    stuck = int(np.sum(~(accept_prob > _STUCK)))
    if noise > LOUD * settings.target_noise:
        found.append(
            f"T = {temperature:.4g}: the noise variance of the mini-batch log-density "
            f"is {noise:.3g} (about {settings.target_noise:g} is good), so that at "
            f"most a share of {ceiling(settings, noise):.1g} of all moves can be "
            f"accepted, and draws are biased. {quieter(settings, temperature)}"
        )
    elif stuck:
        found.append(
            f"{stuck} of {accept_prob.size} chain(s) accepted next to nothing (mean "
            f"acceptance {accept_prob.min():.2g}). Lower the proposal's `step_size`, "
            "allow more warm-up, start closer with `init_strategy`, or rescale the "
            "model if its posterior is too narrow for floating-point numbers."
        )
    if diverging > _ASTRAY:
        found.append(
            f"{diverging:.0%} of all proposals had no finite log-density or gradient "
            "and were rejected. Where such values lie between regions that matter, a "
            "chain may stay in one of them, its steps adapted to that one alone. "
            "Constrain or reparametrise the sites so that the model has a value "
            "everywhere. Otherwise use `RandomWalk()`, or give a `step_size` that "
            "leaps over the gaps with `adapt_step_size=False`, and look at R-hat."
        )
    return found


def expansion_problems(
    settings: Settings, shared: Shared, temperature: float
) -> list[str]:
    """What speaks against an expansion, by its noise over all rows."""
    if shared.noise is None:
        return []
    variance, leftover = (float(np.ravel(x)[0]) for x in shared.noise)
    if is_near(settings, variance, leftover):
        return []
    order = settings.taylor_order
    if variance == math.inf:
        return [
            f"The reference of Taylor(order={order}) is not near a mode: the "
            "log-density is not concave there, and the expansion is no good further "
            "away. The draws are not those of the posterior. Give a mode as "
            "`ref_params`, or use `Taylor(order=0)`."
        ]
    advice = nearer(settings, shared.plates, temperature, variance, leftover)
    return [
        f"What Taylor(order={order}) misses is too large at T = {temperature:.4g}: "
        f"over all rows its noise variance is {variance:.3g} (about "
        f"{settings.target_noise:g} is good), and an error of about {leftover:.2g} "
        "remains in the log-density whatever is corrected. The draws are not those of "
        f"the posterior. {advice}"
    ]


def ceiling(settings: Settings, noise: float | jax.Array) -> jax.Array:
    """Highest acceptance rate that noise of this variance allows."""
    return acceptance_ceiling(noise / settings.num_blocks)
