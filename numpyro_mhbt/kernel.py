"""MHBT: the face that NumPyro sees."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
import math
from typing import Any, Literal
import warnings

import jax
from jax import lax, random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from numpyro.infer import init_to_uniform
from numpyro.infer.mcmc import MCMCKernel
from numpyro.util import is_prng_key

from numpyro_mhbt.adaptation import Adapter, WarmupState
from numpyro_mhbt.checks import (
    check_names,
    check_rows,
    check_sites,
    check_start,
    finite_sites,
)
from numpyro_mhbt.control import Taylor
from numpyro_mhbt.diagnostics import hint_large_constants, warn_after_warmup
from numpyro_mhbt.plates import Batch, draw_batch, first_rows, full_data
from numpyro_mhbt.proposals import RSGLD, Knobs, Proposal
from numpyro_mhbt.setup import (
    Setup,
    Shared,
    choose_temperature,
    find_batch_sites,
    initial_params,
    jit_data,
    make_setup,
    read,
    replay,
)
from numpyro_mhbt.state import MHBTState, from_point, to_point
from numpyro_mhbt.step import Info, Point, Probe, step
from numpyro_mhbt.target import Data, make_evaluate, site_log_probs


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
    :math:`\sqrt T`.

    :param model: NumPyro model. Latent sites must be continuous and stand outside the
        subsampled plates. ``mask``, ``scale`` and ``factor`` inside such a plate count
        as likelihood, outside as prior. Deterministic sites that depend on the batch
        are not collected: ``Predictive(full_data(model), samples)`` has them for all
        rows.
    :param proposal: :class:`~numpyro_mhbt.RSGLD` (default), :class:`~numpyro_mhbt.SGLD`
        or :class:`~numpyro_mhbt.RandomWalk`.
    :param float c_n: scale of the mean log-likelihood, at most n.
    :param float temperature: :math:`T = n / c_n`, given instead of ``c_n``. With
        neither, :math:`c_n = \tfrac23 \sqrt m`, somewhat below :math:`\sqrt m` as the
        paper advises, or T = 1 if nothing is subsampled.
    :param control_variate: :class:`~numpyro_mhbt.Taylor`, or ``None`` for the paper's
        plain estimate.
    :param int steps_per_draw: steps between two draws. They run in one compiled loop,
        which is cheaper than ``thinning`` with a progress bar.
    :param str on_reject: ``"keep"`` the batch of the current point, or ``"refresh"`` it
        as the authors' script does. The latter is for optimisation: it is **not** a
        sampler of the tempered posterior.
    :param bool temper_prior: whether the prior is raised to 1/T like the likelihood.
    :param bool adapt_step_size: adapt the step size in warm-up.
    :param bool adapt_mass_matrix: adapt the mass matrix in warm-up.
    :param bool dense_mass: dense mass matrix instead of a diagonal one.
    :param float target_accept_prob: acceptance rate that warm-up aims at, apart from
        the noise of mini-batches: the rate of all moves is about this one times the
        highest that the noise allows. ``None``: 0.57, or 0.3 for a random walk.
    :param init_strategy: as for :class:`~numpyro.infer.hmc.NUTS`.

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
        temperature: float | None = None,
        control_variate: Taylor | None = Taylor(order=0),  # noqa: B008 (frozen)
        steps_per_draw: int = 1,
        on_reject: Literal["keep", "refresh"] = "keep",
        temper_prior: bool = True,
        adapt_step_size: bool = True,
        adapt_mass_matrix: bool = True,
        dense_mass: bool = False,
        target_accept_prob: float | None = None,
        init_strategy: Callable = init_to_uniform,
    ) -> None:
        if model is None:
            raise ValueError("MHBT needs a `model`.")
        if c_n is not None and temperature is not None:
            raise ValueError(
                f"Give one of `c_n` and `temperature`, got c_n={c_n} and "
                f"temperature={temperature}: they are tied by temperature = n / c_n."
            )
        for name, value in (("c_n", c_n), ("temperature", temperature)):
            if value is not None and not (value > 0 and math.isfinite(value)):
                raise ValueError(f"`{name}` must be positive and finite, got {value}.")
        if on_reject not in ("keep", "refresh"):
            raise ValueError(
                f"`on_reject` must be 'keep' or 'refresh', got {on_reject!r}."
            )
        if steps_per_draw < 1:
            raise ValueError(
                f"`steps_per_draw` must be positive, got {steps_per_draw}."
            )
        self._model = model
        self._proposal: Proposal = RSGLD() if proposal is None else proposal
        self._c_n = c_n
        self._temperature = temperature
        self._control_variate = control_variate
        self._steps_per_draw = steps_per_draw
        self._on_reject = on_reject
        self._temper_prior = temper_prior
        self._adapt_step_size = adapt_step_size
        self._adapt_mass_matrix = adapt_mass_matrix
        self._dense_mass = dense_mass
        self._target_accept_prob = target_accept_prob
        self._init_strategy = init_strategy
        # NumPyro runs `init` on resume as long as this is None.
        self._sample_fn: str | None = None
        self._num_warmup = 0

    @property
    def model(self) -> Callable:
        """The model with every plate whole, which is what ArviZ should see."""
        return full_data(self._model)

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
        self._num_warmup = num_warmup
        data, sites = read(self._model, model_args, model_kwargs)
        check_sites(sites, data.plates)
        if not data.plates:
            warnings.warn(
                "MHBT: no plate of the model has a `subsample_size`, so each step uses "
                "all rows.",
                stacklevel=2,
            )
        # `pmap` traces this method, but what all chains share must be concrete.
        with jax.core.eval_context():
            temperature = choose_temperature(data, self._c_n, self._temperature)
            setup = self._setup(data, sites, temperature)
        if init_params is not None:
            check_names("init_params", init_params, setup.z)
        state, finite = self._jit_start(data, temperature, setup, rng_key, init_params)
        check_start(finite)
        self._sample_fn = "sample"
        return state

    def sample(
        self, state: MHBTState, model_args: tuple, model_kwargs: dict[str, Any] | None
    ) -> MHBTState:
        data, _ = read(self._model, model_args, model_kwargs)
        hint_large_constants(data)
        vectorized = jnp.ndim(state.i) == 1
        lift = jax.vmap if vectorized else _as_is
        # All chains are at the same `i`, so that a branch on it stays a branch.
        i = 1 + (state.i[0] if vectorized else state.i)
        state, probe = lift(partial(self._draw, data, i <= self._num_warmup))(state)
        if self._num_warmup:
            adapt_state = lax.cond(
                i <= self._num_warmup,
                lift(partial(self._adapt, data)),
                lift(lambda state, _: state.adapt_state),
                state,
                probe,
            )
            state = state._replace(
                adapt_state=adapt_state, step_size=adapt_state.step_size
            )
            lax.cond(
                i == self._num_warmup,
                partial(jax.debug.callback, warn_after_warmup),
                lambda *_: None,
                i == self._num_warmup,
                state.mean_accept_prob,
                state.adapt_state.noise_variance,
            )
        return state

    def refresh(
        self, state: MHBTState, model_args: tuple, model_kwargs: dict[str, Any] | None
    ) -> MHBTState:
        data, _ = read(self._model, model_args, model_kwargs)

        def evaluate(state: MHBTState) -> MHBTState:
            point, unravel = to_point(state)
            evaluate = self._evaluate(data, unravel, state.temperature, state.shared)
            point = evaluate(point.z, point.batch)
            return state._replace(**from_point(point, unravel))

        return jax.vmap(evaluate)(state) if jnp.ndim(state.i) else evaluate(state)

    def postprocess_fn(
        self, model_args: tuple, model_kwargs: dict[str, Any] | None
    ) -> Callable[[dict[str, Any]], dict[str, Any]]:
        data, sites = read(self._model, model_args, model_kwargs)

        def constrain(z: dict[str, Any]) -> dict[str, Any]:
            hidden = find_batch_sites(self._model, data, sites, z)
            values = replay(self._model, data, first_rows(data.plates), z)
            return {name: value for name, value in values.items() if name not in hidden}

        return constrain

    def _evaluate(
        self, data: Data, unravel: Callable, temperature: Any, shared: Shared
    ) -> Callable[[jax.Array, Batch], Point]:
        return make_evaluate(
            self._model,
            data._replace(params=shared.params),
            unravel,
            temperature,
            shared.reference,
            temper_prior=self._temper_prior,
            gradient=self._proposal.uses_gradient,
        )

    # Compiled once per shape for this kernel; not pickled.
    @cached_property
    def _jit_setup(self) -> Callable:
        return jit_data(
            lambda data, temperature: make_setup(
                data,
                self._model,
                temperature,
                self._control_variate,
                self._init_strategy,
                self._temper_prior,
            )
        )

    @cached_property
    def _jit_start(self) -> Callable:
        def start(data: Data, temperature: Any, setup: Setup, *chain: Any) -> Any:
            lift = _as_is if is_prng_key(chain[0]) else jax.vmap
            return lift(partial(self._start, data, temperature, setup))(*chain)

        return jit_data(start)

    def __getstate__(self) -> dict[str, Any]:
        compiled = ("_jit_setup", "_jit_start")
        return {k: v for k, v in self.__dict__.items() if k not in compiled}

    def _setup(
        self, data: Data, sites: dict[str, dict[str, Any]], temperature: jax.Array
    ) -> Setup:
        setup = self._jit_setup(data, temperature)
        check_start(setup.finite)
        check_rows(setup.nan_rows)
        hidden = find_batch_sites(self._model, data, sites, setup.z)
        if hidden:
            warnings.warn(
                f"MHBT: deterministic site(s) {sorted(hidden)} depend on the rows of "
                "the batch and are not collected. "
                "`Predictive(full_data(model), samples)` computes them for all rows.",
                stacklevel=3,
            )
        return setup

    def _start(
        self,
        data: Data,
        temperature: jax.Array,
        setup: Setup,
        rng_key: jax.Array,
        init_params: dict[str, Any] | None,
    ) -> tuple[MHBTState, dict[str, jax.Array]]:
        """The initial state of one chain, and whether each site has a density there."""
        rng_key, key_batch, key_init = random.split(rng_key, 3)
        data = data._replace(params=setup.shared.params)
        batch = draw_batch(key_batch, data.plates)
        if init_params is None:
            z = initial_params(key_init, self._model, data, batch, self._init_strategy)
        else:
            z = jax.tree.map(lambda x, y: jnp.asarray(y, x.dtype), setup.z, init_params)
        flat, unravel = ravel_pytree(z)
        number = partial(jnp.asarray, dtype=flat.dtype)
        evaluate = self._evaluate(data, unravel, number(temperature), setup.shared)
        point = evaluate(flat, batch)
        adapt_state = self._adapter().init(flat, number(self._proposal.step_size))
        state = MHBTState(
            i=jnp.zeros((), jnp.int32),
            **from_point(point, unravel),
            accept_prob=number(0),
            mean_accept_prob=number(0),
            accepted=jnp.zeros((), jnp.int32),
            diverging=jnp.zeros((), bool),
            forward=jnp.zeros((), jnp.int32),
            temperature=number(temperature),
            step_size=adapt_state.step_size,
            beta=number(self._proposal.beta),
            adapt_state=adapt_state,
            shared=setup.shared,
            rng_key=rng_key,
        )
        return state, finite_sites(site_log_probs(self._model, data, z, batch)[0])

    def _draw(
        self, data: Data, warmup: jax.Array, state: MHBTState
    ) -> tuple[MHBTState, Probe]:
        """The next draw of one chain: ``steps_per_draw`` steps of Algorithm 1."""
        point, unravel = to_point(state)
        rng_key, key_steps = random.split(state.rng_key)
        one_step = partial(
            step,
            draw=partial(draw_batch, plates=data.plates),
            evaluate=self._evaluate(data, unravel, state.temperature, state.shared),
            proposal=self._proposal,
            knobs=Knobs(
                state.step_size,
                state.beta,
                data.num_rows / state.temperature,
                data.num_rows,
            ),
            mass_sqrt_inv=state.adapt_state.mass_matrix_sqrt_inv,
            refresh=self._on_reject == "refresh",
            probe=warmup,
        )
        if self._steps_per_draw == 1:
            point, info, probe = one_step(key_steps, point)
        else:
            keys = random.split(key_steps, self._steps_per_draw)
            point, (infos, probes) = lax.scan(
                lambda point, key: _carry(*one_step(key, point)), point, keys
            )
            info = Info(
                jnp.mean(infos.accept_prob),
                jnp.sum(infos.accepted, dtype=jnp.int32),
                jnp.any(infos.diverging),
                infos.forward[-1],
            )
            probe = jax.tree.map(jnp.mean, probes)
        i = state.i + 1
        since = jnp.where(warmup, i, i - self._num_warmup)
        mean = state.mean_accept_prob
        state = state._replace(
            i=i,
            **from_point(point, unravel),
            mean_accept_prob=mean + (info.accept_prob - mean) / since,
            rng_key=rng_key,
            **info._asdict(),
        )
        return state, probe

    def _adapter(self) -> Adapter:
        target = self._target_accept_prob
        return Adapter(
            self._num_warmup,
            self._proposal.target_accept_prob if target is None else target,
            adapt_step_size=self._adapt_step_size,
            adapt_mass_matrix=self._adapt_mass_matrix,
            dense_mass=self._dense_mass,
        )

    def _adapt(self, data: Data, state: MHBTState, probe: Probe) -> WarmupState:
        return self._adapter().update(
            state.i - 1,
            probe,
            ravel_pytree(state.z)[0],
            data.num_rows / state.temperature,
            state.adapt_state,
        )


def _carry(point: Point, *seen: Any) -> tuple[Point, tuple]:
    return point, seen


def _as_is(fn: Callable) -> Callable:
    return fn
