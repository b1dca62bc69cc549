"""MHBT: the face that NumPyro sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Literal

import jax
from jax import lax
import jax.numpy as jnp
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_mhbt.chain import (
    adapt,
    evaluate_again,
    following,
    next_draw,
    of_all_chains,
    start,
)
from numpyro_mhbt.checks import check_names, check_sites, checked_start
from numpyro_mhbt.control import Taylor
from numpyro_mhbt.mesh import (
    check_arguments,
    draw_on_devices,
    find_placement,
    start_on_devices,
)
from numpyro_mhbt.plates import first_rows, full_data
from numpyro_mhbt.prepare import Programs, prepare
from numpyro_mhbt.proposals import RSGLD, Proposal, Schedule
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.setup import find_batch_sites, jit_data, read, replay
from numpyro_mhbt.state import MHBTState, Setup
from numpyro_mhbt.target import Data
from numpyro_mhbt.watch import hint_large_constants, warn_of_setup, warn_of_state


class MHBT(MCMCKernel):
    r"""
    Metropolis-Hastings with batch tempering (Wu, Wang and Wong).

    Samples a NumPyro model with a subsampled ``plate`` from mini-batches. Of n rows, m
    are drawn afresh for each proposal, and the pair of parameters and batch is accepted
    or rejected as one:

    .. math::
        \min\left\{1, \frac{q_{I'}(\theta' \to \theta)\, e^{L_{I'}(\theta')}}
            {q_I(\theta \to \theta')\, e^{L_I(\theta)}}\right\},
        \qquad L_I = \frac{1}{T}\bigl[\log \pi_0 + n \hat\mu_I\bigr],

    with :math:`\hat\mu_I` the mean log-likelihood over the batch. A step costs one
    evaluation (with gradient, unless the proposal is a random walk) on m rows whatever
    n is. The draws approximate the posterior raised to the power 1/T, where
    :math:`T = n / c_n` is the temperature: they are wider than the posterior by about
    :math:`\sqrt T`. With ``control_variate=Taylor(order=2)`` regular models are sampled
    at T = 1. :func:`~numpyro_mhbt.batch_report` says what a run is worth.

    :param model: NumPyro model. Latent sites must be continuous and stand outside the
        subsampled plates. ``mask``, ``scale`` and ``factor`` inside such a plate count
        as likelihood, outside as prior. Deterministic sites that depend on the batch
        are not collected: ``Predictive(full_data(model), samples)`` has them for all
        rows.
    :param proposal: :class:`~numpyro_mhbt.RSGLD` (default), :class:`~numpyro_mhbt.SGLD`
        or :class:`~numpyro_mhbt.RandomWalk`.
    :param float c_n: scale of the mean log-likelihood, at most n.
    :param temperature: :math:`T = n / c_n`, given instead of ``c_n``; or a schedule, a
        function of the number of draws so far (each draw then costs one more
        evaluation). With neither, T is chosen once, before warm-up and alike in all
        chains: the coldest, not below 1, at which the noise variance of the
        log-density is about ``target_noise`` at typical points of a Gaussian
        approximation, or on the way of a short pilot run where that does not fit. With
        more than 500 parameters that approximation is not made and
        :math:`c_n = \tfrac23 \sqrt m`, somewhat below :math:`\sqrt m` as the paper
        advises. If nothing is subsampled, T = 1.
    :param float target_noise: noise variance that the choice of T aims at.
    :param control_variate: :class:`~numpyro_mhbt.Taylor`, or ``None`` for the paper's
        plain estimate. Orders 1 and 2 pass over all rows a few times before sampling.
    :param bool bias_correction: subtract half the noise variance, as estimated on the
        batch, from the log-density: without it noise inflates the spread. At m = n it
        vanishes. Order 2 without it may have no proper target.
    :param int num_blocks: parts of the batch, of which each step draws one anew. The
        noise in the acceptance ratio falls by their number; the bias does not.
    :param bool share_batches: whether chains of ``chain_method="vectorized"`` propose
        with the same batches, whose rows are then gathered once for all: many chains
        take less than half the time. Each is as exact as on its own, but they are no
        longer independent. Where noise is loud they err together, which R-hat and the
        effective sample size do not see; at T = 1 with little noise it is nothing.
    :param int steps_per_draw: steps between two draws. They run in one compiled loop,
        which is cheaper than ``thinning`` with a progress bar.
    :param str on_reject: ``"keep"`` the batch of the current point, or ``"refresh"`` it
        as the authors' script does: the next step then does not move, and only looks at
        the current point on the next batch. This is for optimisation: it is **not** a
        sampler of the tempered posterior.
    :param bool temper_prior: whether the prior is raised to 1/T like the likelihood.
    :param bool adapt_step_size: adapt the step size in warm-up.
    :param bool adapt_mass_matrix: adapt the mass matrix in warm-up.
    :param bool dense_mass: adapt a dense mass matrix instead of a diagonal one. Both
        are learnt in the coordinates of the Gaussian approximation that T was chosen
        by, if one was made, so that the diagonal one, too, has its correlations. With a
        control variate of order 1 or 2 that approximation is the mass matrix, and only
        ``dense_mass=True`` adapts it.
    :param float target_accept_prob: acceptance rate that warm-up aims at, apart from
        the noise of mini-batches: the rate of all moves is about this one times the
        highest that the noise allows. ``None``: 0.45, or 0.3 for a random walk.
    :param init_strategy: as for :class:`~numpyro.infer.hmc.NUTS`. ``None``: each chain
        climbs from :func:`~numpyro.infer.initialization.init_to_uniform` for some
        mini-batch steps, since far out noise would keep it from moving; with a control
        variate of order 1 or 2, which is no good far from its reference, chains start
        around that point, twice as wide as the posterior.

    **Example**

    .. doctest::

        >>> from jax import random
        >>> import jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_mhbt import MHBT
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("N", len(y), subsample_size=100):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))
        >>> y = 3 + random.normal(random.key(0), (10_000,))
        >>> mcmc = MCMC(MHBT(model, c_n=10), num_warmup=500, num_samples=4000,
        ...             progress_bar=False)
        >>> mcmc.run(random.key(1), y, extra_fields=("temperature",))
        >>> float(mcmc.get_extra_fields()["temperature"][-1])
        1000.0
        >>> print(f"{mcmc.get_samples()['mu'].mean():.1f}")
        3.0

    **References:**

    1. *Mini-batch Metropolis-Hastings MCMC with Reversible SGLD Proposal*, Tung-Yu Wu,
       Y. X. Rachel Wang, Wing H. Wong.
    """

    def __init__(
        self,
        model: Callable | None = None,
        proposal: Proposal | None = None,
        *,
        c_n: float | None = None,
        temperature: float | Schedule | None = None,
        target_noise: float = 1.0,
        control_variate: Taylor | None = Taylor(order=0),  # noqa: B008 (frozen)
        bias_correction: bool = True,
        num_blocks: int = 1,
        share_batches: bool = False,
        steps_per_draw: int = 1,
        on_reject: Literal["keep", "refresh"] = "keep",
        temper_prior: bool = True,
        adapt_step_size: bool = True,
        adapt_mass_matrix: bool = True,
        dense_mass: bool = False,
        target_accept_prob: float | None = None,
        init_strategy: Callable | None = None,
    ) -> None:
        proposal = RSGLD() if proposal is None else proposal
        if target_accept_prob is None:
            target_accept_prob = getattr(proposal, "target_accept_prob", 0.5)
        if model is None:
            raise ValueError("MHBT needs a `model`.")
        self._settings = Settings(
            model,
            proposal,
            c_n,
            temperature,
            target_noise,
            control_variate,
            bias_correction,
            num_blocks,
            share_batches,
            steps_per_draw,
            on_reject,
            temper_prior,
            adapt_step_size,
            adapt_mass_matrix,
            dense_mass,
            target_accept_prob,
            init_strategy,
        )
        # NumPyro runs `init` on resume as long as this is None.
        self._sample_fn: str | None = None

    @property
    def model(self) -> Callable:
        """The model with every plate whole, which is what ArviZ should see."""
        return full_data(self._settings.model)

    @property
    def sample_field(self) -> str:
        return "z"

    @property
    def default_fields(self) -> tuple[str, ...]:
        return ("z", "diverging")

    def get_diagnostics_str(self, state: MHBTState) -> str:
        return (
            f"acc. prob={state.mean_accept_prob:.2f}, "
            f"step size {state.step_size:.2e}, T={state.temperature:.4g}"
        )

    def init(
        self,
        rng_key: jax.Array,
        num_warmup: int,
        init_params: dict[str, Any] | None,
        model_args: tuple = (),
        model_kwargs: dict[str, Any] | None = None,
    ) -> MHBTState:
        data, sites = read(self._settings.model, model_args, model_kwargs)
        check_sites(sites, data.plates)
        data = data._replace(placement=find_placement(data, rng_key))
        # `pmap` traces this method, but what all chains share must be concrete.
        with jax.core.eval_context():
            setup = prepare(self._settings, self._programs, data)
            hidden = find_batch_sites(self._settings.model, data, sites, setup.z)
        warn_of_setup(self._settings, setup, hidden)
        if init_params is not None:
            check_names("init_params", init_params, setup.z)
        state, finite, slopes = self._jit_start(
            data, setup, rng_key, init_params, num_warmup=num_warmup
        )
        state = state._replace(i=checked_start(state.i, finite, slopes))
        self._sample_fn = "sample"
        return state

    def sample(
        self, state: MHBTState, model_args: tuple, model_kwargs: dict[str, Any] | None
    ) -> MHBTState:
        shared = state.shared
        # Rounding depends on how XLA fuses operations. Between barriers it does so in
        # one way, whatever loop this is part of: with a progress bar or without.
        state = lax.optimization_barrier(state)
        data, _ = read(self._settings.model, model_args, model_kwargs)
        if data.plates != state.shared.plates:
            raise ValueError(
                f"The chain began with the plates {state.shared.plates}, and cannot go "
                f"on with data that make them {data.plates}."
            )
        check_arguments(data, state)
        hint_large_constants(data)
        state = draw_on_devices(self._draw, data, state)
        own = {k: v for k, v in state._asdict().items() if k != "shared"}
        return MHBTState(**lax.optimization_barrier(own), shared=shared)

    def _draw(self, data: Data, state: MHBTState) -> MHBTState:
        num_warmup = state.adapt_state.num_warmup
        vectorized = jnp.ndim(state.i) == 1
        lift = jax.vmap if vectorized else _as_is
        i = following(of_all_chains(state.i[0] if vectorized else state.i))
        advance = partial(next_draw, settings=self._settings, data=data, i=i)
        state, paired_accept_prob = lift(advance)(state)
        if num_warmup:
            learn = partial(adapt, settings=self._settings, num_rows=data.num_rows)
            adapt_state = lax.cond(
                i <= num_warmup,
                lift(learn),
                lift(lambda state, _: state.adapt_state),
                state,
                paired_accept_prob,
            )
            state = state._replace(adapt_state=adapt_state)
            if self._settings.step_size_schedule is None:
                state = state._replace(step_size=adapt_state.step_size)
        return warn_of_state(self._settings, data, i, state)

    def refresh(
        self, state: MHBTState, model_args: tuple, model_kwargs: dict[str, Any] | None
    ) -> MHBTState:
        data, _ = read(self._settings.model, model_args, model_kwargs)

        def run(data: Data, state: MHBTState) -> MHBTState:
            again = partial(evaluate_again, settings=self._settings, data=data)
            return jax.vmap(again)(state) if jnp.ndim(state.i) else again(state)

        return draw_on_devices(run, data, state)

    def postprocess_fn(
        self, model_args: tuple, model_kwargs: dict[str, Any] | None
    ) -> Callable[[dict[str, Any]], dict[str, Any]]:
        model = self._settings.model
        data, sites = read(model, model_args, model_kwargs)

        def constrain(data: Data, z: dict[str, Any]) -> dict[str, Any]:
            hidden = find_batch_sites(model, data, sites, z)
            values = replay(model, data, first_rows(data.plates), z)
            kept = {k: value for k, value in values.items() if k not in hidden}
            return lax.optimization_barrier(kept)

        if find_placement(data) is not None:
            # Compiled, rows of which nothing depends stay where they are.
            return partial(jit_data(constrain), data)
        return partial(constrain, data)

    # Compiled once per shape for this kernel; not pickled.
    @cached_property
    def _programs(self) -> Programs:
        return Programs(self._settings)

    @cached_property
    def _jit_start(self) -> Callable:
        def run(data: Data, setup: Setup, *chain: Any, num_warmup: int) -> Any:
            lift = _as_is if is_prng_key(chain[0]) else jax.vmap
            begin = partial(start, settings=self._settings, num_warmup=num_warmup)

            def here(data: Data, setup: Setup, *chain: Any) -> Any:
                return lift(partial(begin, data, setup))(*chain)

            started = start_on_devices(here, data, setup, *chain)
            return lax.optimization_barrier(started)

        return jit_data(run, quick=True)

    def __getstate__(self) -> dict[str, Any]:
        compiled = ("_programs", "_jit_start")
        return {k: v for k, v in self.__dict__.items() if k not in compiled}


def _as_is(fn: Callable) -> Callable:
    return fn
