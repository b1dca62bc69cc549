"""From draws at temperature T to draws of the posterior."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro.diagnostics import effective_sample_size
from numpyro.handlers import seed
from numpyro.infer import MCMC
from numpyro.infer.util import unconstrain_fn

from numpyro_mhbt.advice import FEWEST, colder
from numpyro_mhbt.control import Taylor
from numpyro_mhbt.convert import finished, import_arviz, param_values, temperature_of
from numpyro_mhbt.disk import fetch
from numpyro_mhbt.mesh import across, everywhere, find_placement
from numpyro_mhbt.passes import gains, groups_of, sum_over_rows
from numpyro_mhbt.plates import first_rows, with_rows
from numpyro_mhbt.prepare import Programs, expand
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.setup import jit_data, read, replay
from numpyro_mhbt.state import MHBTState
from numpyro_mhbt.target import Data, log_terms
from numpyro_mhbt.temperature import MAX_DIM, Curvature
from numpyro_mhbt.vectors import flatten


class Untempered(NamedTuple):
    """Draws of the posterior, and how far to trust them."""

    samples: dict[str, np.ndarray]
    """As of :meth:`~numpyro.infer.mcmc.MCMC.get_samples`."""
    k_hat: float | None
    """Pareto shape of the weights (below 0.7 is good); ``None`` if rescaled."""
    ess: float | None
    """How many independent draws the weighted ones are worth; ``None`` if rescaled."""


def untemper(
    mcmc: MCMC,
    *,
    method: Literal["importance", "rescale"] = "importance",
    rng_key: jax.Array | None = None,
) -> Untempered:
    r"""
    Draws of the posterior from those of a finished run at temperature T > 1.

    ``"importance"`` weighs each draw by :math:`\pi(\theta)^{1 - 1/T}` on all rows,
    which takes one pass over them, smooths the weights (PSIS, by ArviZ) and draws by
    them. Of N draws of a Gaussian in d dimensions about
    :math:`N ((2 T - 1) / T^2)^{d/2}` are left; where the weights collapse it refuses.

    ``"rescale"`` shrinks the draws by 1/sqrt(T) towards the mode of the posterior, in
    unconstrained space (by less or more where the curvature at the mode shows what was
    not tempered). **This is an approximation**: right in the limit of many rows, where
    the posterior is Gaussian, and for one mode only. No weight tells if it fails.

    :param mcmc: after :meth:`~numpyro.infer.mcmc.MCMC.run` of a
        :class:`~numpyro_mhbt.MHBT` kernel, which still holds its data.
    :param rng_key: for drawing by weights.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_mhbt import MHBT, untemper
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("N", len(y), subsample_size=100):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))
        >>> y = 3 + random.normal(random.key(0), (300,))
        >>> mcmc = MCMC(
        ...     MHBT(model, temperature=4),
        ...     num_warmup=500,
        ...     num_samples=8000,
        ...     progress_bar=False,
        ... )
        >>> mcmc.run(random.key(1), y)
        >>> print(f"{mcmc.get_samples()['mu'].std():.2f}")  # 2 / sqrt(300)
        0.12
        >>> print(f"{untemper(mcmc).samples['mu'].std():.2f}")  # 1 / sqrt(300)
        0.06
    """
    settings, state = finished(mcmc, "untemper")
    if settings.temperature_schedule is not None:
        raise ValueError("untemper needs one temperature, and `temperature` varied.")
    if settings.on_reject == "refresh":
        raise ValueError(
            "With on_reject='refresh' draws are of no posterior, tempered or not."
        )
    temperature = temperature_of(state)
    data, latent = data_and_latent(mcmc, settings, state)
    points, unravel = unconstrained(settings, data, latent)
    samples = {k: np.asarray(v) for k, v in mcmc.get_samples().items()}
    if method == "rescale":
        return _rescaled(mcmc, settings, data, points, unravel, temperature)
    if method != "importance":
        raise ValueError(f"method must be 'importance' or 'rescale', got {method!r}.")
    if temperature == 1:
        by_chain = np.asarray(points).reshape(mcmc.num_chains, -1, points.shape[1])
        worth = float(np.min(effective_sample_size(by_chain)))
        return Untempered(samples, 0.0, min(worth, float(len(points))))
    prior, likelihood = log_posterior(settings, data, points, unravel, "Weights")
    tempered = likelihood + prior if settings.temper_prior else likelihood
    log_weights = (1 - 1 / temperature) * tempered
    chains = log_weights.reshape(mcmc.num_chains, -1)
    efficiency = min(float(effective_sample_size(chains)) / len(points), 1.0)
    log_weights, k_hat = _smoothed(log_weights, efficiency)
    weights = np.exp(log_weights - np.max(log_weights))
    weights /= weights.sum()
    ess = efficiency / float(np.sum(weights**2))
    # Vehtari and others (2024): what so many draws can bear.
    limit = min(1 - 1 / np.log10(len(points)), 0.7)
    if not (k_hat <= limit and ess >= FEWEST):
        raise ValueError(
            f"The weights that would take draws from T = {temperature:.4g} to 1 "
            f"collapse: k-hat is {k_hat:.2f} (at most {limit:.2f} is good), and the "
            f"draws would be worth {ess:.0f}. To sample at a lower temperature, "
            f"{colder(settings)}; or try method='rescale', which is an approximation."
        )
    key = random.key(0) if rng_key is None else rng_key
    chosen = _systematic(float(random.uniform(key)), weights)
    return Untempered({k: v[chosen] for k, v in samples.items()}, k_hat, ess)


def data_and_latent(
    mcmc: MCMC, settings: Settings, state: MHBTState
) -> tuple[Data, dict[str, np.ndarray]]:
    """The data of a finished run, and its draws of latent sites."""
    data, sites = read(settings.model, mcmc._args, mcmc._kwargs)
    latent = {
        name: np.asarray(draws)
        for name, draws in mcmc.get_samples().items()
        if sites.get(name, {}).get("type") == "sample"
    }
    data = data._replace(params=param_values(state), placement=find_placement(data))
    return data, latent


def unconstrained(
    settings: Settings, data: Data, latent: dict[str, Any]
) -> tuple[jax.Array, Callable]:
    """A row for each draw, and the way from a row to named values."""

    def every(data: Data, latent: dict[str, Any]) -> dict[str, Any]:
        model = seed(with_rows(settings.model, first_rows(data.plates)), random.key(0))
        unconstrain = partial(unconstrain_fn, model, data.args, data.kwargs)
        return jax.vmap(unconstrain)(latent)

    # Compiled, the likelihood, of which nothing depends, is not computed.
    named = jit_data(every)(data, jax.tree.map(jnp.asarray, latent))
    unravel = ravel_pytree(jax.tree.map(lambda x: x[0], named))[1]
    return jax.vmap(flatten)(named), unravel


def log_posterior(
    settings: Settings, data: Data, points: jax.Array, unravel: Callable, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """
    Log-prior, and log-likelihood of all rows up to a constant, at each point.

    Densities of constrained values, none of them tempered. Rows count by their
    difference to those at the first point, since float32 does not hold the sum of many.

    :param what: said beside the progress bar.
    """

    def others(data: Data, points: jax.Array) -> tuple[jax.Array, jax.Array]:
        rows = first_rows(data.plates)
        data = fetch(data, rows)

        def one(z: jax.Array) -> tuple[jax.Array, jax.Array]:
            terms = log_terms(settings.model, data, unravel(z), rows)
            return terms.prior, terms.exact

        return across(data, jax.lax.map(one, points))

    found = jit_data(everywhere(others))(data, points)
    prior, likelihood = (np.asarray(x, np.float64) for x in found)
    first = unravel(points[0])

    def run(data: Data, z: dict[str, Any], *rest: Any, **options: Any) -> Any:
        return gains(data, *rest, model=settings.model, unravel=unravel, **options)

    program = jit_data(everywhere(run))
    for group in groups_of(settings.model, data, first):
        likelihood = likelihood + sum_over_rows(
            program,
            data,
            first,
            points,
            group=group,
            what=what,
            width=1,
        )
    return prior, likelihood


def tempered_log_density(
    settings: Settings, data: Data, at: dict[str, Any], temperature: float, what: str
) -> np.ndarray:
    """
    Of constrained values, up to a constant; NaN outside the support.

    :param at: values of latent sites, one for each point.
    """
    points, unravel = unconstrained(settings, data, at)
    prior, likelihood = log_posterior(settings, data, points, unravel, what)
    prior = prior / temperature if settings.temper_prior else prior

    def constrain(data: Data, points: jax.Array) -> dict[str, jax.Array]:
        def one(z: jax.Array) -> dict[str, jax.Array]:
            named = replay(settings.model, data, first_rows(data.plates), unravel(z))
            return {name: named[name] for name in at}

        return jax.vmap(one)(points)

    # Values outside the support do not come back from unconstrained space. (Nor do some
    # means, as of Cholesky factors, but near enough to stand for what stays the same.)
    back = jit_data(constrain)(data, points)
    inside = np.ones(len(points), bool)
    for name, values in at.items():
        if np.ptp(values, axis=0).any():
            near = {"rtol": 1e-3, "atol": 1e-3 * np.ptp(values)}
            close = np.isclose(back[name], values, **near)
            inside &= close.reshape(len(points), -1).all(axis=1)
    return np.where(inside, likelihood / temperature + prior, np.nan)


def _rescaled(
    mcmc: MCMC,
    settings: Settings,
    data: Data,
    points: jax.Array,
    unravel: Callable,
    temperature: float,
) -> Untempered:
    mean = jnp.mean(points, axis=0)
    if mean.size > MAX_DIM:
        raise ValueError(
            f"method='rescale' needs the mode, found by Newton's method in at most "
            f"{MAX_DIM} dimensions; the model has {mean.size}."
        )
    programs = Programs(settings)
    search = partial(expand, settings, programs, data, unravel(mean))
    reference, curve = search(mean, Taylor(order=2), 1.0)
    assert curve is not None  # known at order 2
    step, decrement = curve.newton_step(1.0)
    if decrement == np.inf:
        raise ValueError("No mode was found near the mean of the draws to shrink to.")
    mode = reference.z + jnp.asarray(step, mean.dtype)
    # By 1/sqrt(T), but for what is not tempered: the Jacobian, and a prior if so asked.
    # Around their own mean, which heat moves away from the mode.
    shrink = np.linalg.solve(_root(curve, 1.0), _root(curve, temperature))
    shrunk = mode + (points - mean) @ jnp.asarray(shrink, mean.dtype).T
    constrain = mcmc.sampler.postprocess_fn(mcmc._args, mcmc._kwargs)
    samples = jax.jit(jax.vmap(lambda z: constrain(unravel(z))))(shrunk)
    return Untempered({k: np.asarray(v) for k, v in samples.items()}, None, None)


def _root(curve: Curvature, temperature: float) -> np.ndarray:
    """Symmetric square root of the precision at temperature T."""
    values, vectors = np.linalg.eigh(-curve.at(temperature)[1])
    return vectors * np.sqrt(np.maximum(values, 0)) @ vectors.T


def _smoothed(log_weights: np.ndarray, efficiency: float) -> tuple[np.ndarray, float]:
    """Pareto-smoothed, and the shape of their tail."""
    az = import_arviz()
    # The fit of the tail may overflow, to weights of zero.
    with np.errstate(over="ignore"):
        if hasattr(az, "psislw"):
            smoothed, k_hat = az.psislw(log_weights, efficiency)
        else:  # ArviZ 1.x, which asks for the log of what is to be divided by
            from arviz_stats.base import array_stats

            smoothed, k_hat = array_stats.psislw(-log_weights, efficiency)
    return np.asarray(smoothed), float(k_hat)


def _systematic(offset: float, weights: np.ndarray) -> np.ndarray:
    """As many draws as there are, each about as often as its weight says."""
    places = (offset + np.arange(len(weights))) / len(weights)
    chosen = np.searchsorted(np.cumsum(weights), places)
    return np.minimum(chosen, len(weights) - 1)
