"""Everything that NumPyro's ``MCMC`` promises holds for the kernel."""

from contextlib import contextmanager
import dataclasses
from functools import cache
import pickle
from types import SimpleNamespace
import warnings

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, init_to_median, init_to_sample, init_to_value
import pytest

from numpyro_mhbt import MHBT, RandomWalk, Taylor

ROWS, BATCH = 200, 40
Y = np.random.default_rng(0).normal(0.5, 1.0, ROWS).astype(np.float32)
FIELDS = {
    "accept_prob": "f",
    "accepted": "i",
    "beta": "f",
    "diverging": "b",
    "forward": "i",
    "noise_variance": "f",
    "potential_energy": "f",
    "step_size": "f",
    "temperature": "f",
}
# `jax.vmap` cannot use what NumPyro donates (the same with NUTS).
donation = pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
VMAP = pytest.param(jax.vmap, 2, id="jax.vmap", marks=donation)
CHAINS = [
    ("sequential", 1),
    ("sequential", 2),
    ("parallel", 2),
    ("vectorized", 2),
    VMAP,
]


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.Uniform(0.5, 2))
    with numpyro.plate("N", len(y), subsample_size=BATCH):
        numpyro.sample("y", dist.Normal(mu, sd), obs=numpyro.subsample(y, 0))


def whole_model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    numpyro.sample("y", dist.Normal(mu, 1), obs=y)


def make_kernel(**options):
    return MHBT(model, c_n=20, **options)


KERNEL = make_kernel()


def make_mcmc(kernel=KERNEL, bar=True, **options):
    """With a bar NumPyro compiles the step once, without it the loop for each run."""
    options = {"num_warmup": 50, "num_samples": 30, **options}
    mcmc = MCMC(kernel, progress_bar=False, **options)
    mcmc.progress_bar = bar  # NumPyro switches it off where the variable CI is set
    return mcmc


def resume(mcmc, *args, **kwargs):
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.run(mcmc.last_state.rng_key, *args, **kwargs)
    jax.block_until_ready(mcmc.last_state)


def assert_equal(one, other, rtol=1e-5):
    """Equal trees, up to rounding."""
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = random.key_data(x), random.key_data(y)
        np.testing.assert_allclose(x, y, rtol=rtol, atol=rtol)


@pytest.fixture
def x64():
    """Double precision, for the effect of rounding grows along a chain."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@contextmanager
def compiled():
    """The names of the functions that are compiled within."""
    names = []

    def listen(event, _, fun_name="", **rest):
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield names
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


@contextmanager
def said():
    """What the kernel warns of within, from the compiled loop too."""
    messages = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
        jax.effects_barrier()
    messages += [str(w.message) for w in caught if "MHBT" in str(w.message)]


@cache
def run_whole():
    """Two chains: warm up, then draw 60, in double precision and without a bar."""
    mcmc = make_mcmc(bar=False, num_samples=60, num_chains=2, chain_method="vectorized")
    mcmc.warmup(random.key(1), Y.astype(float))
    warm = mcmc.post_warmup_state
    mcmc.run(warm.rng_key, Y.astype(float), extra_fields=["step_size"])
    return SimpleNamespace(
        warm=warm,
        last=mcmc.last_state,
        draws=mcmc.get_samples(group_by_chain=True),
        step_size=mcmc.get_extra_fields(group_by_chain=True)["step_size"],
    )


@cache
def run_parts(method, num_chains):
    """The same chains, or the first: warm up and draw 30, and then another 30."""
    bar = not callable(method)
    mcmc = make_mcmc(bar=bar, num_chains=num_chains, chain_method=method)
    keys = random.split(random.key(1))
    mcmc.run(keys if num_chains == 2 else keys[0], Y.astype(float))
    first = mcmc.get_samples(group_by_chain=True)
    if method == "parallel" or num_chains == 1:
        mcmc = pickle.loads(pickle.dumps(mcmc))
        assert_equal(mcmc.get_samples(group_by_chain=True), first)
    resume(mcmc, Y.astype(float))
    second = mcmc.get_samples(group_by_chain=True)
    return SimpleNamespace(first=first, second=second, last=mcmc.last_state)


@cache
def run_one():
    """One chain in single precision: a run, some more, and another run."""
    mcmc, y = make_mcmc(), jnp.asarray(Y)
    with compiled() as by_first:
        mcmc.run(random.key(1), y, extra_fields=tuple(FIELDS))
    first, fields = mcmc.get_samples(), mcmc.get_extra_fields()
    state = mcmc.last_state
    with compiled() as by_second:
        resume(mcmc, y, extra_fields=tuple(FIELDS))
    second = mcmc.get_samples()
    mcmc.post_warmup_state = None
    with compiled() as by_other:
        mcmc.run(random.key(2), y, extra_fields=tuple(FIELDS))
    return SimpleNamespace(
        mcmc=mcmc,
        first=first,
        fields=fields,
        state=state,
        second=second,
        compiled=(by_first, by_second, by_other),
    )


@cache
def run_thinned():
    """The second part of :func:`run_one` again, but not all of it."""
    mcmc = make_mcmc(thinning=3)
    mcmc.post_warmup_state = run_one().state
    key, fields = run_one().state.rng_key, ("~z.mu", "z.sd")
    mcmc.run(key, jnp.asarray(Y), extra_fields=fields)
    return mcmc


@pytest.mark.parametrize("method, num_chains", CHAINS)
def test_chain_methods_give_the_same_draws(x64, method, num_chains):
    """And it makes no difference whether there is a progress bar."""
    whole = jax.tree.map(lambda x: x[:num_chains, :30], run_whole().draws)
    assert np.all(np.ptp(whole["mu"], axis=1) > 0)
    assert_equal(run_parts(method, num_chains).first, whole)


@pytest.mark.parametrize("method, num_chains", CHAINS)
def test_resumed_run_continues_the_same_chains(x64, method, num_chains):
    """Also from a pickle (``parallel`` and one chain)."""
    parts, last = run_parts(method, num_chains), run_whole().last
    assert_equal(
        parts.second, jax.tree.map(lambda x: x[:num_chains, 30:], run_whole().draws)
    )
    if num_chains == 1:
        last = jax.tree.map(lambda x: x[0], last)
    assert_equal(parts.last, last)


def test_adaptation_stops_after_warmup(x64):
    warm, last = run_whole().warm, run_whole().last
    assert np.all(run_whole().step_size == warm.step_size[:, None])
    jax.tree.map(np.testing.assert_array_equal, warm.adapt_state, last.adapt_state)
    mass = warm.adapt_state.mass_matrix_sqrt_inv
    assert mass.shape == (2, 2)
    assert np.all(mass != 1)


def test_progress_bar_shows_diagnostics(capsys):
    mcmc = run_one().mcmc
    resume(mcmc, jnp.asarray(Y))
    line = mcmc.sampler.get_diagnostics_str(mcmc.last_state)
    assert f"acc. prob={mcmc.last_state.mean_accept_prob:.2f}" in line
    assert f"step size {mcmc.last_state.step_size:.2e}" in line
    assert "T=10" in line
    assert line in capsys.readouterr().err


def test_each_extra_field_is_one_number_per_draw():
    check_fields(run_one().first, run_one().fields, steps_per_draw=1)


def test_many_steps_per_draw_in_double_precision(x64):
    mcmc = make_mcmc(make_kernel(steps_per_draw=5))
    mcmc.run(random.key(1), Y.astype(float), extra_fields=tuple(FIELDS))
    draws, fields = mcmc.get_samples(), mcmc.get_extra_fields()
    dtypes = {x.dtype.name for x in (*draws.values(), *fields.values())}
    assert dtypes == {"bool", "float64", "int32"}
    check_fields(draws, fields, steps_per_draw=5)


def check_fields(draws, fields, steps_per_draw):
    assert set(fields) == set(FIELDS)
    for name, kind in FIELDS.items():
        assert fields[name].shape == (30,), name
        assert fields[name].dtype.kind == kind, name
        assert np.all(np.isfinite(fields[name])), name
    assert np.all((fields["accept_prob"] >= 0) & (fields["accept_prob"] <= 1))
    assert set(np.unique(fields["accepted"])) <= set(range(steps_per_draw + 1))
    assert set(np.unique(fields["forward"])) == {0, 1}
    assert not np.any(fields["diverging"])
    assert np.all(fields["noise_variance"] >= 0)
    assert np.ptp(fields["step_size"]) == 0
    assert np.all(fields["temperature"] == 10)
    assert np.all(fields["beta"] == 1)
    moved = np.diff(draws["mu"]) != 0
    np.testing.assert_array_equal(moved, fields["accepted"][1:] > 0)


def test_thinning_keeps_every_third_draw():
    draws = run_thinned().get_samples()["sd"]
    assert_equal(draws, run_one().second["sd"][2::3])


def test_sites_can_be_left_out_or_collected_unconstrained():
    draws, fields = run_thinned().get_samples(), run_thinned().get_extra_fields()
    assert set(draws) == {"sd"}
    assert set(fields) == {"z.sd", "diverging"}
    constrained = 0.5 + 1.5 / (1 + np.exp(-fields["z.sd"]))
    np.testing.assert_allclose(draws["sd"], constrained, rtol=1e-5)


def test_pickled_kernel_with_legacy_key_and_numpy_keyword_gives_the_same_draws():
    mcmc = make_mcmc(pickle.loads(pickle.dumps(make_kernel())))
    mcmc.run(random.PRNGKey(1), y=Y)
    assert_equal(mcmc.get_samples(), run_one().first)
    copy = pickle.loads(pickle.dumps(mcmc))
    assert_equal(copy.get_samples(), mcmc.get_samples())
    assert_equal(copy.last_state, mcmc.last_state)


def test_init_params_are_the_first_state():
    init_params = {"mu": jnp.array(0.7), "sd": jnp.array(-0.2)}
    state = KERNEL.init(random.key(0), 50, init_params, (Y,), {})
    assert_equal(state.z, init_params)


def test_init_params_of_vectorized_chains_are_the_first_state():
    init_params = {"mu": jnp.array([0.2, 0.7]), "sd": jnp.array([-0.2, 0.1])}
    keys = random.split(random.key(0))
    assert_equal(KERNEL.init(keys, 50, init_params, (Y,), {}).z, init_params)


def test_init_params_of_parallel_chains():
    kernel = make_kernel(proposal=RandomWalk(1e-6), control_variate=None)
    mcmc = make_mcmc(
        kernel, num_warmup=0, num_samples=1, num_chains=2, chain_method="parallel"
    )
    init_params = {"mu": jnp.array([0.2, 0.7]), "sd": jnp.array([-0.2, 0.1])}
    mcmc.run(random.key(0), Y, init_params=init_params, extra_fields=["z.mu", "z.sd"])
    fields = mcmc.get_extra_fields()
    np.testing.assert_allclose(fields["z.mu"], init_params["mu"], atol=1e-4)
    np.testing.assert_allclose(fields["z.sd"], init_params["sd"], atol=1e-4)


@pytest.mark.parametrize(
    "strategy, center, spread",
    [
        (init_to_value(values={"mu": 1.5, "sd": 1.2}), 1.5, 0),
        (init_to_median(num_samples=15), 0, 2 * np.sqrt(np.pi / 2 / 15)),
        (init_to_sample, 0, 2),
    ],
    ids=["value", "median", "sample"],
)
def test_init_strategy_sets_where_chains_start(strategy, center, spread):
    kernel = make_kernel(init_strategy=strategy, control_variate=None)
    mu = kernel.init(random.split(random.key(0), 500), 0, None, (Y,), {}).z["mu"]
    assert np.std(mu) == pytest.approx(spread, rel=0.15, abs=1e-5)
    assert np.mean(mu) == pytest.approx(center, abs=0.3)


def test_print_summary(capsys):
    run_one().mcmc.print_summary()
    out = capsys.readouterr().out
    assert "mu" in out
    assert "sd" in out
    assert "Number of divergences: 0" in out


def test_step_is_compiled_once():
    by_first, by_second, by_other = run_one().compiled
    assert by_first.count("jit(_body_fn)") == 1
    assert by_second == []
    assert "jit(_body_fn)" not in by_other


def test_second_run_compiles_nothing():
    assert run_one().compiled[-1] == []


def test_jit_model_args_takes_new_data_to_the_compiled_step(x64):
    mcmc = make_mcmc(num_samples=60, jit_model_args=True)
    mcmc.run(random.split(random.key(1))[0], jnp.asarray(Y, float))
    assert_equal(mcmc.get_samples(), jax.tree.map(lambda x: x[0], run_whole().draws))
    with compiled() as names:
        mcmc.run(random.key(1), jnp.asarray(Y + 1.5, float))
    assert "jit(_body_fn)" not in names
    assert np.mean(mcmc.get_samples()["mu"]) == pytest.approx(Y.mean() + 1.5, abs=0.6)


def test_model_without_plate_runs_and_says_so():
    mcmc = make_mcmc(MHBT(whole_model), num_chains=2, chain_method="vectorized")
    with pytest.warns(UserWarning, match="no plate .* `subsample_size`") as caught:
        mcmc.run(random.key(0), Y, extra_fields=("noise_variance", "temperature"))
    assert len(caught) == 1
    fields = mcmc.get_extra_fields()
    assert np.all(fields["noise_variance"] == 0)
    assert np.all(fields["temperature"] == 1)


@cache
def run_noisy(method, num_chains):
    """A run at T = 1, where the noise is far too large, and what it says."""
    kernel = MHBT(model, RandomWalk(), temperature=1, control_variate=None)
    mcmc = make_mcmc(
        kernel,
        bar=method in ("sequential", "vectorized"),
        num_samples=5,
        num_chains=num_chains,
        chain_method=method,
    )
    with said() as messages:
        mcmc.run(random.key(0), Y)
    return mcmc, messages


@pytest.mark.parametrize("method, num_chains", CHAINS[1:])
def test_loud_noise_is_told_when_warmup_ends(method, num_chains):
    _, messages = run_noisy(method, num_chains)
    # Chains that do not know of each other speak for themselves.
    apart = method in ("sequential", "parallel")
    assert len(messages) == (num_chains if apart else 1)
    for message in messages:
        assert "nois" in message
        assert "subsample_size" in message
        assert "temperature" in message


@pytest.mark.parametrize("method, num_chains", [("vectorized", 2), VMAP])
def test_resumed_run_does_not_warn_again(method, num_chains):
    """With ``vmap`` the state then has a chain axis, and a branch on it is taken."""
    mcmc, _ = run_noisy(method, num_chains)
    with said() as messages:
        resume(mcmc, Y)
    assert messages == []


def test_chain_that_never_moves_is_told_when_warmup_ends():
    kernel = make_kernel(
        proposal=RandomWalk(1e6), adapt_step_size=False, control_variate=None
    )
    with said() as messages:
        make_mcmc(kernel, num_samples=1).run(random.key(0), Y)
    (message,) = messages
    assert "accepted next to nothing" in message
    assert "step_size" in message


@pytest.mark.parametrize("num_chains", [1, 2])
def test_refresh_changes_nothing_for_the_same_data(x64, num_chains):
    state = run_whole().last
    if num_chains == 1:
        state = jax.tree.map(lambda x: x[0], state)
    refresh = jax.jit(lambda state, y: KERNEL.refresh(state, (y,), {}))
    assert_equal(refresh(state, Y.astype(float)), state)
    other = refresh(state, Y.astype(float) + 1)
    assert_equal((other.z, other.batch), (state.z, state.batch))
    assert np.all(other.potential_energy != state.potential_energy)
    assert np.all(other.log_density != state.log_density)


def test_kernel_shared_by_two_runs_of_different_warmup():
    """Each chain knows its own warm-up."""
    kernel = make_kernel()
    mcmc = make_mcmc(kernel, bar=False)
    mcmc.run(random.key(0), Y)
    make_mcmc(kernel, bar=False, num_warmup=500, num_samples=1).run(random.key(1), Y)
    before = mcmc.last_state.step_size
    resume(mcmc, Y)
    assert mcmc.last_state.step_size == before
    assert mcmc.last_state.adapt_state.num_warmup == 50


@pytest.mark.parametrize("order", [0, 2])
def test_step_allocates_nothing_of_the_size_of_the_data(order):
    kernel = MHBT(model, temperature=1.0, control_variate=Taylor(order))
    state = kernel.init(random.key(0), 10, None, (Y,), {})

    def temporary(n):
        plates = (state.shared.plates[0]._replace(size=n),)
        shared = dataclasses.replace(state.shared, plates=plates)
        args = (jax.ShapeDtypeStruct((n,), np.float32),)
        step = jax.jit(lambda s, a: kernel.sample(s, a, {}))
        compiled = step.lower(state._replace(shared=shared), args).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(10**8) < temporary(10**4) + 10**4
