"""Is a run to be trusted? What is asked of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass
import math
from typing import Any

import jax
import numpy as np
from numpyro.diagnostics import effective_sample_size, split_gelman_rubin
from numpyro.infer import MCMC

from numpyro_mhbt.advice import (
    CAUSE,
    COLD,
    allowed,
    batch_size,
    colder,
    loudness_at_one,
    quieter,
    reached,
)
from numpyro_mhbt.convert import finished, temperature_of
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.state import MHBTState, Shared, num_params
from numpyro_mhbt.vectors import flatten
from numpyro_mhbt.warn import warn
from numpyro_mhbt.watch import ceiling, expansion_problems, problems

_FAR = 25.0  # squared standard deviations per parameter
_HOT = 10.0
_R_HAT = 1.01
_ALMOST = 1.1  # R-hat of chains that need no more than time
_NAMED = 3  # coordinates


@dataclass(frozen=True)
class BatchReport:
    """
    What :func:`batch_report` found. ``print`` it for a table.

     - **num_rows** - n.
     - **subsample_size** - m, by plate.
     - **exact_rows** - how many rows are part of every step besides
       (:class:`~numpyro_mhbt.Taylor`).
     - **c_n**, **temperature** - T = n / c_n.
     - **noise_variance** - v, of the log-density over batches.
     - **accept_prob** - mean acceptance rate.
     - **accept_ceiling** - the highest rate that noise allows, chains averaged.
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
    exact_rows: int
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
        if self.exact_rows:
            batch += f", and {self.exact_rows} in every step"
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
    varies = values.std(axis=(0, 1)) > 0
    values = values[..., varies]
    moved = values.size > 0 and np.all(values.std(axis=1) > 0)
    ess = float(np.min(effective_sample_size(values))) if moved else 0.0
    by_coordinate = split_gelman_rubin(values) if moved else np.full(1, math.inf)
    r_hat = float(np.max(by_coordinate))
    shared = state.shared
    temperature = temperature_of(state)
    noise = float(np.median(state.mean_noise_variance))
    accept = np.ravel(state.mean_accept_prob)
    diverging = float(np.mean(state.mean_diverging))
    worst = np.argsort(by_coordinate)[::-1][:_NAMED]
    slowest = _names(draws, np.flatnonzero(varies)[worst]) if moved else []
    found = [
        *problems(settings, temperature, noise, accept, diverging),
        *expansion_problems(settings, shared, temperature),
        *_mixing_problems(settings, temperature, noise, r_hat, slowest),
        *_reference_problems(settings, state),
    ]
    inflation = _inflation(settings, temperature, noise, num_params(state))
    verdict = " ".join(found) or _heat(settings, shared, temperature, noise, inflation)
    # Told once, after all that comes of it.
    verdict = verdict.replace(f" {CAUSE}", "", max(verdict.count(CAUSE) - 1, 0))
    if found:
        if temperature > COLD:
            verdict += (
                f" And at T = {temperature:.4g} the draws aimed at are {inflation:.2g} "
                "times wider than the posterior."
            )
        warn(verdict)
    return BatchReport(
        num_rows=shared.num_rows,
        subsample_size={plate.name: plate.subsample_size for plate in shared.plates},
        exact_rows=_count_exact(shared),
        c_n=shared.num_rows / temperature,
        temperature=temperature,
        noise_variance=noise,
        accept_prob=float(accept.mean()),
        accept_ceiling=float(np.mean(ceiling(settings, state.mean_noise_variance))),
        spread_inflation=inflation,
        ess_per_gradient=ess / (draws_made * settings.steps_per_draw),
        r_hat=r_hat,
        num_diverging=int(np.sum(mcmc.get_extra_fields()["diverging"])),
        trusted=not found,
        verdict=verdict,
    )


def _count_exact(shared: Shared) -> int:
    reference = shared.reference
    if reference is None or reference.always is None:
        return 0
    return reference.always.shape[-1]


def _inflation(settings: Settings, temperature: float, v: float, dim: int) -> float:
    """
    Spread of the draws over that of the posterior.

    Uncorrected noise of order 0 adds v/2 to the log-density, of which v/d is the share
    of the curvature: a variance larger by 1 / (1 - v/d).
    """
    bias = 1.0
    if not settings.bias_correction and settings.taylor_order == 0:
        bias = 1 / max(1 - v / dim, 1e-3)
    return math.sqrt(temperature * bias)


def _heat(
    settings: Settings, shared: Shared, temperature: float, v: float, inflation: float
) -> str:
    """What T means for the reader, and what would lower it."""
    if temperature < COLD:
        wider = "the draws are those of the posterior."
        if inflation > 1.02:
            wider = f"noise makes draws {inflation:.3g} times wider than the posterior."
        return f"T = {temperature:.4g}: {wider}"
    text = (
        f"T = {temperature:.4g}: draws are {inflation:.2g} times wider than the "
        "posterior; "
    )
    if math.isnan(v):
        return text + "raise subsample_size, since one row does not show its noise."
    enough = allowed(settings, temperature, v)
    if enough < 0.7 * temperature:
        return text + f"noise near the target would allow T = {enough:.3g}."
    ways = []
    if len(shared.plates) == 1 and settings.taylor_order < 1:
        needed = batch_size(shared.plates[0], loudness_at_one(settings, temperature, v))
        ways.append(f"raise subsample_size to about {needed}")
    ways.append(colder(settings))
    return text + " or ".join(ways) + " to reach T = 1."


def _names(draws: dict[str, Any], places: np.ndarray) -> list[str]:
    """Of coordinates, by where they stand among all of them."""
    names = []
    for place in places:
        for site, values in sorted(draws.items()):
            shape = values.shape[2:]
            if place < math.prod(shape):
                index = ", ".join(map(str, np.unravel_index(place, shape)))
                names.append(f"{site}[{index}]" if shape else site)
                break
            place -= math.prod(shape)
    return names


def _mixing_problems(
    settings: Settings,
    temperature: float,
    noise: float,
    r_hat: float,
    slowest: list[str],
) -> list[str]:
    """Whether chains agree, and if not, what may help."""
    if r_hat < _R_HAT:
        return []
    text = f"Chains have not mixed: R-hat is {r_hat:.4g}. "
    if r_hat < _ALMOST:
        text = f"Chains have not mixed well yet: R-hat is {r_hat:.4g}. "
    if slowest:
        text += f"It is highest for {', '.join(slowest)}. "
    if noise > 2 * settings.target_noise:
        text += (
            f"Noise of variance {noise:.2g} keeps acceptance below "
            f"{ceiling(settings, noise):.2g}. {quieter(settings, temperature)}"
        )
    elif settings.taylor_order > 0 and r_hat > _ALMOST:
        # The expansion has told all correlations.
        text += f"Draw more. {CAUSE}"
    elif settings.dense_mass or settings.taylor_order > 0:
        text += "Draw more, or allow more warm-up."
    else:
        text += (
            "Draw more, allow more warm-up, or try `dense_mass=True`, which helps "
            "where parameters are correlated."
        )
    if settings.temper_prior and temperature > _HOT:
        text += (
            f" At T = {temperature:.4g} the prior, too, is raised to 1/T and hardly "
            "holds what rows do not tell apart: `temper_prior=False` keeps it."
        )
    return [text]


def _reference_problems(settings: Settings, state: MHBTState) -> list[str]:
    """Whether chains have left what an expansion was made around."""
    reference = state.shared.reference
    if reference is None or reference.grad is None:
        return []
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
    if not far > _FAR:
        return []
    return [
        f"Chains are {math.sqrt(far):.2g} standard deviations per parameter away from "
        f"the reference of the control variate. {reached(settings)}"
    ]
