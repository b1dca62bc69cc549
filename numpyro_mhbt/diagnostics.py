"""Is a run to be trusted? What is asked of it while it runs and afterwards."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
import math
import warnings

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC
from numpyro.util import not_jax_tracer

from numpyro_mhbt.adaptation import acceptance_ceiling
from numpyro_mhbt.convert import finished, temperature_of
from numpyro_mhbt.mesh import is_first
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.state import MHBTState, Setup, Shared
from numpyro_mhbt.target import Data, fingerprint, shows_noise
from numpyro_mhbt.vectors import flatten

_STUCK = 0.005
_ASTRAY = 0.1  # of all proposals
_LOUD = 8.0  # times the target
_LEFTOVER = 0.5
_FAR = 25.0
_HOT = 10.0
_R_HAT = 1.01
_LARGE = 2**28
_LOOK_AT = (1000, 10_000, 100_000)


@dataclass(frozen=True)
class BatchReport:
    """
    What :func:`batch_report` found. ``print`` it for a table.

     - **num_rows** - n.
     - **subsample_size** - m, by plate.
     - **c_n**, **temperature** - T = n / c_n.
     - **noise_variance** - v, of the log-density over batches.
     - **accept_prob** - mean acceptance rate.
     - **accept_ceiling** - the highest rate that noise of variance v allows.
     - **spread_inflation** - how many times wider than the posterior the draws are
       expected to be.
     - **ess_per_gradient** - smallest effective sample size of any site, by evaluation
       of a batch.
     - **r_hat** - largest split R-hat.
     - **num_diverging** - draws after which a proposal had no finite density.
     - **trusted** - whether nothing speaks against the draws.
     - **verdict** - in plain words.
    """

    num_rows: float
    subsample_size: dict[str, int]
    c_n: float
    temperature: float
    noise_variance: float
    accept_prob: float
    accept_ceiling: float
    spread_inflation: float
    ess_per_gradient: float
    r_hat: float
    num_diverging: int
    trusted: bool
    verdict: str

    def __str__(self) -> str:
        batch = ", ".join(f"{m} ({name})" for name, m in self.subsample_size.items())
        lines = {
            "rows n": f"{self.num_rows:.0f}",
            "batch m": batch or "all rows",
            "scale c_n": f"{self.c_n:.4g}",
            "temperature T": f"{self.temperature:.4g}",
            "noise variance v": f"{self.noise_variance:.3g}",
            "acceptance": f"{self.accept_prob:.2f}, at most {self.accept_ceiling:.2f}",
            "wider than posterior": f"{self.spread_inflation:.3g} times",
            "ESS per gradient": f"{self.ess_per_gradient:.2g}",
            "R-hat": f"{self.r_hat:.3f}",
            "diverging": f"{self.num_diverging}",
        }
        table = "\n".join(f"{name:<22}{value}" for name, value in lines.items())
        return f"{table}\n{self.verdict}"


def batch_report(mcmc: MCMC) -> BatchReport:
    """
    Temperature, noise and mixing of a finished run, with a verdict in plain words.

    The verdict is also a ``UserWarning`` when the run is not to be trusted.

    :param mcmc: after :meth:`~numpyro.infer.mcmc.MCMC.run` of a
        :class:`~numpyro_mhbt.MHBT` kernel.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_mhbt import MHBT, Taylor, batch_report
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("N", len(y), subsample_size=100):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))
        >>> y = 3 + random.normal(random.key(0), (10_000,))
        >>> kernel = MHBT(model, control_variate=Taylor(order=2))
        >>> mcmc = MCMC(kernel, num_warmup=500, num_samples=4000, progress_bar=False)
        >>> mcmc.run(random.key(1), y)
        >>> report = batch_report(mcmc)
        >>> report.temperature
        1.0
        >>> print(report.verdict)
        T = 1: the draws are those of the posterior.
    """
    settings, state = finished(mcmc, "batch_report")
    draws = mcmc.get_samples(group_by_chain=True)
    flat = [np.asarray(x).reshape(*x.shape[:2], -1) for x in jax.tree.leaves(draws)]
    values = np.concatenate(flat, axis=2)
    draws_made = values.shape[0] * values.shape[1] * mcmc.thinning
    # Some coordinates are the same always, such as the zeros of a Cholesky factor.
    values = values[..., values.std(axis=(0, 1)) > 0]
    moved = values.size > 0 and np.all(values.std(axis=1) > 0)
    ess = float(np.min(effective_sample_size(values))) if moved else 0.0
    r_hat = float(np.max(split_gelman_rubin(values))) if moved else math.inf
    shared = state.shared
    temperature = temperature_of(state)
    noise = float(np.median(state.mean_noise_variance))
    accept = np.ravel(state.mean_accept_prob)
    diverging = float(np.mean(state.mean_diverging))
    problems = [
        *_problems(settings, temperature, noise, accept, diverging),
        *_expansion_problems(settings, shared, temperature),
        *_after_the_run(settings, state, r_hat, noise),
    ]
    inflation = _inflation(settings, temperature, noise, state.z_grad.shape[-1])
    verdict = " ".join(problems) or _heat(
        settings, shared, temperature, noise, inflation
    )
    if problems:
        _warn(verdict)
    return BatchReport(
        num_rows=shared.num_rows,
        subsample_size={plate.name: plate.subsample_size for plate in shared.plates},
        c_n=shared.num_rows / temperature,
        temperature=temperature,
        noise_variance=noise,
        accept_prob=float(accept.mean()),
        accept_ceiling=float(acceptance_ceiling(noise / settings.num_blocks)),
        spread_inflation=inflation,
        ess_per_gradient=ess / (draws_made * settings.steps_per_draw),
        r_hat=r_hat,
        num_diverging=int(np.sum(mcmc.get_extra_fields()["diverging"])),
        trusted=not problems,
        verdict=verdict,
    )


def _order(settings: Settings) -> int:
    return -1 if settings.control_variate is None else settings.control_variate.order


def _inflation(settings: Settings, temperature: float, v: float, dim: int) -> float:
    """
    Spread of the draws over that of the posterior.

    Uncorrected noise of order 0 adds v/2 to the log-density, of which v/d is the share
    of the curvature: a variance larger by 1 / (1 - v/d).
    """
    bias = 1.0
    if not settings.bias_correction and _order(settings) == 0:
        bias = 1 / max(1 - v / dim, 1e-3)
    return math.sqrt(temperature * bias)


def _heat(
    settings: Settings, shared: Shared, temperature: float, v: float, inflation: float
) -> str:
    """What T means for the reader, and what would lower it."""
    if temperature < 1.005:
        wider = "the draws are those of the posterior."
        if inflation > 1.02:
            wider = f"noise makes draws {inflation:.3g} times wider than the posterior."
        return f"T = {temperature:.4g}: {wider}"
    text = (
        f"T = {temperature:.4g}: draws are {inflation:.2g} times wider than the "
        "posterior; "
    )
    # v grows like T^-2 with no control variate, T^-1 with order 0, not with order 1.
    power = {-1: 2, 0: 1, 1: 0, 2: -1}[_order(settings)]
    allowed = temperature
    if power > 0:
        allowed = max(1.0, temperature * (v / settings.target_noise) ** (1 / power))
    if allowed < 0.7 * temperature:
        return text + f"noise near the target would allow T = {allowed:.3g}."
    ways = []
    if len(shared.plates) == 1 and power > 0:
        ((_, n, m),) = shared.plates
        quieter = settings.target_noise / max(v * temperature**power, 1e-30)
        needed = math.ceil(1 / ((1 / m - 1 / n) * quieter + 1 / n))
        ways.append(f"raise subsample_size to about {float(f'{needed:.1g}'):.0f}")
    if _order(settings) < 2:
        ways.append("use Taylor(order=2)")
    return text + (" or ".join(ways) or "raise subsample_size") + " to reach T = 1."


def _problems(
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
    if noise > _LOUD * settings.target_noise:
        ceiling = float(acceptance_ceiling(noise / settings.num_blocks))
        found.append(
            f"T = {temperature:.4g}: the noise variance of the mini-batch log-density "
            f"is {noise:.3g} (about {settings.target_noise:g} is good), so that at "
            f"most a share of {ceiling:.1g} of all moves can be accepted, and draws "
            "are biased. Raise `subsample_size`, or lower `c_n` (raise `temperature`)."
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


def _expansion_problems(
    settings: Settings, shared: Shared, temperature: float
) -> list[str]:
    if shared.noise is None:
        return []
    variance, leftover = (float(np.ravel(x)[0]) for x in shared.noise)
    if variance <= _LOUD * settings.target_noise and leftover <= _LEFTOVER:
        return []
    if variance == math.inf:
        return [
            f"The reference of Taylor(order={_order(settings)}) is not near a mode: "
            "the log-density is not concave there, and the expansion is no good "
            "further away. The draws are not those of the posterior. Give a mode as "
            "`ref_params`, or use `Taylor(order=0)`."
        ]
    return [
        f"What Taylor(order={_order(settings)}) misses is too large at T = "
        f"{temperature:.4g}: over all rows its noise variance is {variance:.3g} (about "
        f"{settings.target_noise:g} is good), and an error of about {leftover:.2g} "
        "remains in the log-density whatever is corrected. The draws are not those of "
        "the posterior. Use `Taylor(order=0)`, raise `subsample_size`, or look for "
        "parameters that few rows inform."
    ]


def _after_the_run(
    settings: Settings, state: MHBTState, r_hat: float, noise: float
) -> list[str]:
    found = []
    if not r_hat < _R_HAT:
        text = f"Chains have not mixed: R-hat is {r_hat:.4g}. "
        if noise > 2 * settings.target_noise:
            ceiling = float(acceptance_ceiling(noise / settings.num_blocks))
            text += (
                f"Noise of variance {noise:.2g} keeps acceptance below {ceiling:.2g}: "
                "raise `subsample_size` or `temperature`."
            )
        elif settings.dense_mass:
            text += "Draw more, or allow more warm-up."
        else:
            text += (
                "Draw more, allow more warm-up, or try `dense_mass=True`, which helps "
                "where parameters are correlated."
            )
        temperature = float(np.max(state.temperature))
        if settings.temper_prior and temperature > _HOT:
            text += (
                f" At T = {temperature:.4g} the prior, too, is raised to 1/T and "
                "hardly holds what rows do not tell apart: `temper_prior=False` keeps "
                "it."
            )
        found.append(text)
    reference = state.shared.reference
    if reference is not None and reference.grad is not None:
        many = np.ndim(state.i) == 1
        flat = jax.vmap(flatten)(state.z) if many else flatten(state.z)
        away = np.asarray(flat - reference.z)
        whiten = np.asarray(state.adapt_state.mass_matrix_sqrt_inv)
        c_n = state.shared.num_rows / np.asarray(state.temperature)
        if whiten.ndim - many == 2:
            unit = np.linalg.solve(np.swapaxes(whiten, -1, -2), away[..., None])[..., 0]
        else:
            unit = away / whiten
        far = float(np.median(c_n * np.mean(unit**2, axis=-1)))
        if far > _FAR:
            found.append(
                f"Chains are {math.sqrt(far):.2g} standard deviations per parameter "
                "away from the reference of the control variate. Give a better one as "
                f"`Taylor({_order(settings)}, ref_params=...)`."
            )
    return found


def warn_of_setup(settings: Settings, setup: Setup, hidden: Collection[str]) -> None:
    """Say what of the model and its expansion a user should know before sampling."""
    plates = setup.shared.plates
    if not plates:
        _warn(
            "no plate of the model has a `subsample_size`, so each step uses all rows."
        )
    if hidden:
        _warn(
            f"deterministic site(s) {sorted(hidden)} depend on the rows of the batch "
            "and are not collected. `Predictive(full_data(model), samples)` computes "
            "them for all rows."
        )
    if not shows_noise(plates):
        _warn(
            "with `subsample_size=1` a batch does not show its own noise, so "
            "`noise_variance` is not known and the bias is not corrected."
        )
    heat = float(setup.temperature)
    for problem in _expansion_problems(settings, setup.shared, heat):
        _warn(problem)


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
    _warn(
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
    for text in _problems(settings, heat, noise, accept, float(np.mean(diverging))):
        _warn(text)


def hint_large_constants(data: Data) -> None:
    """Say how to keep large data out of the program that NumPyro compiles."""
    leaves = jax.tree.leaves((data.args, data.kwargs))
    size = sum(
        x.nbytes for x in leaves if isinstance(x, jax.Array) and not_jax_tracer(x)
    )
    if size > _LARGE:
        _warn(
            f"{size / 2**20:.0f} MiB of data are compiled into the program as "
            "constants, which takes time and copies them. "
            "`MCMC(..., jit_model_args=True)` passes them as arguments instead."
        )


def _warn(text: str) -> None:
    warnings.warn(f"MHBT: {text}", stacklevel=3)
