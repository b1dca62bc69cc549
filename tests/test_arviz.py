"""ArviZ and ``Predictive`` see all rows in their order, and every field."""

from functools import cache
import pickle
import warnings

import jax
from jax import random
import jax.numpy as jnp
import matplotlib
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC, NUTS, Predictive, init_to_uniform, init_to_value
from numpyro.infer import log_likelihood as numpyro_log_likelihood
import pytest

from numpyro_mhbt import MHBT, Taylor, full_data, plates, to_arviz

with warnings.catch_warnings():  # 0.23 announces 1.0
    warnings.filterwarnings("ignore", r"\s*ArviZ is undergoing", FutureWarning)
    import arviz as az

matplotlib.use("Agg")

ROWS, BATCH = 100, 20
RNG = np.random.default_rng(0)
X = RNG.normal(size=(ROWS, 2)).astype(np.float32)
Y = (RNG.random(ROWS) < 1 / (1 + np.exp(-X @ [1.0, -0.5]))).astype(np.int32)
# Counts in the first and in the last batch agree by chance.
Y[-BATCH:] = Y[:BATCH]
FIELDS = {
    "accept_prob": "acceptance_rate",
    "accepted": "accepted",
    "beta": "beta",
    "diverging": "diverging",
    "forward": "forward",
    "noise_variance": "noise_variance",
    "potential_energy": "lp",
    "step_size": "step_size",
    "temperature": "temperature",
}


def logistic(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("N", len(x), subsample_size=BATCH):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=xb @ w), obs=yb)


def deterministic(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    numpyro.deterministic("odds", jnp.exp(w))
    with numpyro.plate("N", len(x), subsample_size=BATCH) as rows:
        p = numpyro.deterministic("p", jax.nn.sigmoid(x[rows] @ w))
        obs = None if y is None else y[rows]
        numpyro.sample("y", dist.Bernoulli(probs=p), obs=obs)
    numpyro.deterministic("mean_p", jnp.mean(p))


def count(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("N", len(x), subsample_size=BATCH):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=xb @ w), obs=yb)
    numpyro.deterministic("positives", jnp.sum(yb))


def improper(x, y):
    w = numpyro.sample("w", dist.ImproperUniform(constraints.real_vector, (), (2,)))
    scale = numpyro.sample("scale", dist.ImproperUniform(constraints.positive, (), ()))
    numpyro.deterministic("log_scale", jnp.log(scale))
    numpyro.factor("prior", -jnp.sum(w**2) - scale)
    with numpyro.plate("N", len(x), subsample_size=BATCH):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Normal(xb @ w, scale), obs=yb)
        numpyro.factor("tail", -jnp.abs(yb - xb @ w))


def run(model, *args, temperature=10, init_strategy=init_to_uniform, **options):
    mcmc = MCMC(
        MHBT(model, temperature=temperature, init_strategy=init_strategy),
        num_warmup=50,
        num_samples=30,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *args, extra_fields=tuple(FIELDS), **options)
    return mcmc


@cache
def run_logistic():
    return run(logistic, X, y=Y)


@cache
def converted():
    return az.from_numpyro(run_logistic(), log_likelihood=True)


@cache
def run_improper():
    start = init_to_value(values={"w": jnp.zeros(2), "scale": 1.0})
    return run(improper, X, Y.astype(np.float32), init_strategy=start)


def log_likelihood(w):
    logits = np.asarray(w) @ X.T
    return Y * logits - np.log1p(np.exp(logits))


def test_posterior():
    posterior = converted()["posterior"]
    assert set(posterior.data_vars) == {"w"}
    assert posterior["w"].shape == (2, 30, 2)
    draws = run_logistic().get_samples(group_by_chain=True)["w"]
    np.testing.assert_array_equal(posterior["w"].values, draws)


def test_observed_data_are_all_rows_in_order():
    observed = converted()["observed_data"]
    assert observed["y"].dims == ("N",)
    np.testing.assert_array_equal(observed["y"].values, Y)


def test_sample_stats_have_every_field():
    stats, fields = converted()["sample_stats"], run_logistic().get_extra_fields(True)
    assert set(stats.data_vars) == set(FIELDS.values())
    for ours, theirs in FIELDS.items():
        sign = -1 if theirs == "lp" else 1
        np.testing.assert_array_equal(stats[theirs].values, sign * fields[ours])
        assert stats[theirs].dims == ("chain", "draw")
    assert stats["diverging"].dtype == bool


def test_log_likelihood_is_of_all_rows():
    values = converted()["log_likelihood"]["y"].values
    expected = log_likelihood(run_logistic().get_samples(group_by_chain=True)["w"])
    assert values.shape == (2, 30, ROWS)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_summary_and_trace_plot():
    summary = az.summary(converted())
    assert list(summary.index) == ["w[0]", "w[1]"]
    az.plot_trace(converted())
    matplotlib.pyplot.close("all")


def test_unpickled_run_converts_alike():
    idata = az.from_numpyro(pickle.loads(pickle.dumps(run_logistic())))
    for group, name in (("posterior", "w"), ("observed_data", "y")):
        np.testing.assert_array_equal(
            idata[group][name].values, converted()[group][name].values
        )


def test_factor_improper_prior_and_deterministic_site():
    mcmc = run_improper()
    idata = az.from_numpyro(mcmc, log_likelihood=True)
    posterior = idata["posterior"]
    assert set(posterior.data_vars) == {"w", "scale", "log_scale"}
    np.testing.assert_allclose(
        posterior["log_scale"].values, np.log(posterior["scale"].values), rtol=1e-5
    )
    np.testing.assert_array_equal(idata["observed_data"]["y"].values, Y)
    w, scale = (np.asarray(mcmc.get_samples(True)[name]) for name in ("w", "scale"))
    residuals, scale = Y - w @ X.T, scale[..., None]
    expected = -0.5 * (residuals / scale) ** 2 - np.log(scale * np.sqrt(2 * np.pi))
    values = idata["log_likelihood"]
    np.testing.assert_allclose(values["y"].values, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(
        values["tail"].values, -np.abs(residuals), rtol=1e-3, atol=1e-4
    )
    assert "scale" in az.summary(idata).index


def test_predictive_returns_all_rows():
    draws = run_logistic().get_samples()
    y = Predictive(full_data(logistic), draws)(random.key(1), X)["y"]
    assert y.shape == (60, ROWS)
    assert set(np.unique(y)) == {0, 1}
    expected = 1 / (1 + np.exp(-np.asarray(draws["w"]) @ X.T))
    assert np.corrcoef(y.mean(0), expected.mean(0))[0, 1] > 0.8


def test_posterior_predictive_converts():
    predictive = Predictive(full_data(logistic), run_logistic().get_samples())
    idata = az.from_numpyro(
        run_logistic(), posterior_predictive=predictive(random.key(1), X)
    )
    assert idata["posterior_predictive"]["y"].shape == (2, 30, ROWS)


@cache
def run_deterministic():
    """NumPy data, and a plate whose rows index them."""
    with pytest.warns(UserWarning, match=r"\['mean_p', 'p'\] depend on") as caught:
        mcmc = run(deterministic, X, y=Y)
    assert len(caught) == 1
    return mcmc


def test_deterministic_site_is_collected_unless_it_depends_on_the_batch():
    draws = run_deterministic().get_samples()
    assert set(draws) == {"w", "odds"}
    np.testing.assert_allclose(draws["odds"], np.exp(draws["w"]), rtol=1e-5)


def test_predictive_has_deterministic_sites_for_all_rows():
    draws = run_deterministic().get_samples()
    whole = Predictive(full_data(deterministic), draws)(random.key(1), X)
    p = 1 / (1 + np.exp(-np.asarray(draws["w"]) @ X.T))
    assert whole["y"].shape == (60, ROWS)
    np.testing.assert_allclose(whole["p"], p, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(whole["mean_p"], p.mean(1), rtol=1e-4)


def test_numpy_data_indexed_by_the_rows_of_the_plate_convert():
    idata = az.from_numpyro(run_deterministic())
    assert set(idata["posterior"].data_vars) == {"w", "odds"}
    np.testing.assert_array_equal(idata["observed_data"]["y"].values, Y)


def test_fresh_kernel_knows_which_sites_to_collect():
    """As when it goes on from a saved state."""
    constrain = MHBT(deterministic).postprocess_fn((X,), {"y": Y})
    assert set(constrain({"w": jnp.zeros(2)})) == {"w", "odds"}


def test_site_of_the_batch_is_found_although_its_value_is_the_same_on_many():
    kernel = MHBT(count, control_variate=None)
    with pytest.warns(UserWarning, match=r"\['positives'\] depend on"):
        state = kernel.init(random.key(0), 0, None, (X, Y), {})
    assert set(kernel.postprocess_fn((X, Y), {})(state.z)) == {"w"}


GROUPS = RNG.integers(0, 3, ROWS)
PAIRS = RNG.normal(size=(ROWS, 2)).astype(np.float32) + GROUPS[:, None]


def grouped(groups, pairs, weights):
    with numpyro.plate("group", 3):
        level = numpyro.sample("level", dist.Normal(0, 3))
        shift = numpyro.sample("shift", dist.Normal(0, 1).expand([2]).to_event(1))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    numpyro.sample("apart", dist.Normal(level[0], 1), obs=jnp.float32(0.5))
    with numpyro.plate("weighed", 10, subsample_size=5) as rows:
        numpyro.sample("weight", dist.Normal(level[1], scale), obs=weights[rows])
    with numpyro.plate("N", len(pairs), subsample_size=BATCH) as rows:
        loc = level[groups[rows], None] + shift[groups[rows]]
        numpyro.sample("y", dist.Normal(loc, scale).to_event(1), obs=pairs[rows])


@cache
def run_grouped():
    weights = jnp.linspace(-1, 1, 10)
    return run(grouped, GROUPS, PAIRS, weights, temperature=50)


@cache
def convert_grouped(seed=0, **options):
    mcmc, says = run_grouped(), r"^MHBT: draws are of the .* T = 50, .*LOO"
    with (
        pytest.MonkeyPatch.context() as patch,
        pytest.warns(UserWarning, match=says) as caught,
    ):
        # Several chunks, the last of which reaches back.
        patch.setattr(plates, "_CHUNK", 30)
        idata = to_arviz(mcmc, rng_key=random.key(seed), **options)
    (warning,) = caught
    assert warning.filename == __file__
    assert "`untemper`" not in str(warning.message)  # too few draws for that T
    assert "`Taylor(order=2)`" in str(warning.message)
    return idata


def everything():
    return convert_grouped(log_likelihood=True, posterior_predictive=True)


def test_dimensions_are_named_after_plates():
    posterior = everything()["posterior"]
    assert posterior["level"].dims == ("chain", "draw", "group")
    assert posterior["shift"].dims[:3] == ("chain", "draw", "group")
    assert posterior["scale"].dims == ("chain", "draw")
    np.testing.assert_array_equal(posterior["group"], np.arange(3))
    for group in ("observed_data", "posterior_predictive"):
        dims = everything()[group]["y"].dims
        assert dims[-2] == "N" and dims[-1].startswith("y_dim")
    np.testing.assert_array_equal(everything()["observed_data"]["y"], PAIRS)
    log_likelihood = everything()["log_likelihood"]
    assert log_likelihood["y"].dims == ("chain", "draw", "N")
    assert log_likelihood["weight"].dims == ("chain", "draw", "weighed")
    assert log_likelihood["apart"].dims == ("chain", "draw")
    for dim in ("chain", "draw", "N"):
        np.testing.assert_array_equal(
            log_likelihood[dim], np.arange(log_likelihood.sizes[dim])
        )


def test_temperature_is_an_attribute():
    attrs = everything()["posterior"].attrs
    assert attrs["temperature"] == 50
    assert attrs["c_n"] == pytest.approx((ROWS + 10) / 50)


def test_log_likelihood_is_that_of_numpyro_on_all_rows():
    mcmc = run_grouped()
    draws = mcmc.get_samples(group_by_chain=True)
    args = [jnp.asarray(x) for x in mcmc._args]
    model = full_data(grouped)
    theirs = numpyro_log_likelihood(model, draws, *args, batch_ndims=2)
    ours = everything()["log_likelihood"]
    assert set(ours.data_vars) == set(theirs) == {"apart", "weight", "y"}
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], values, rtol=1e-4, atol=1e-5)


def test_predictions_are_drawn_for_every_row_and_draw():
    mcmc = run_grouped()
    draws = {k: np.asarray(v) for k, v in mcmc.get_samples(True).items()}
    predicted = everything()["posterior_predictive"]
    assert set(predicted.data_vars) == {"apart", "weight", "y"}
    loc = draws["level"][..., GROUPS, None] + draws["shift"][..., GROUPS, :]
    noise = (predicted["y"].values - loc) / draws["scale"][..., None, None]
    assert abs(noise.mean()) < 4 / noise.size**0.5
    assert abs(noise.var() - 1) < 4 * (2 / noise.size) ** 0.5
    # Chunks of rows have noise of their own, and so have draws.
    assert len(np.unique(noise)) > 0.99 * noise.size
    other = convert_grouped(posterior_predictive=True, seed=3)
    assert not np.allclose(other["posterior_predictive"]["y"], predicted["y"])


def test_thinned():
    thin = convert_grouped(log_likelihood=True, thin=7)
    whole = everything()
    for group, name in (("posterior", "level"), ("log_likelihood", "y")):
        np.testing.assert_array_equal(
            thin[group][name], whole[group][name].isel(draw=slice(None, None, 7))
        )
    np.testing.assert_array_equal(thin["observed_data"]["y"], PAIRS)


def test_names_that_the_user_gives():
    names = {"coords": {"column": ["left", "right"]}, "dims": {"w": ["column"]}}
    with pytest.warns(UserWarning, match="MHBT: "):
        idata = to_arviz(run_logistic(), log_likelihood=True, **names)
    assert list(idata["posterior"]["column"].values) == ["left", "right"]
    assert idata["log_likelihood"]["y"].shape == (2, 30, ROWS)


def first_of(*names):
    """Functions of ArviZ 1.x, then of 0.x."""
    return next(getattr(az, name) for name in names if hasattr(az, name))


@pytest.mark.parametrize(
    "plot",
    [
        lambda data: first_of("plot_trace_dist", "plot_trace")(data),
        lambda data: az.plot_trace(data),
        lambda data: az.plot_rank(data),
        lambda data: (
            az.plot_ess_evolution(data)
            if hasattr(az, "plot_ess_evolution")
            else az.plot_ess(data, kind="evolution")
        ),
        lambda data: az.plot_pair(data, var_names=["level", "scale"]),
        lambda data: first_of("plot_ppc_dist", "plot_ppc")(data, var_names=["y"]),
    ],
    ids=["trace_dist", "trace", "rank", "ess", "pair", "ppc"],
)
def test_plots_of_arviz(plot):
    plot(everything())
    figure = matplotlib.pyplot.gcf()
    assert any(ax.has_data() for ax in figure.axes)
    matplotlib.pyplot.close("all")


def test_summary_has_every_coordinate():
    index = list(az.summary(everything()).index)
    assert {"level[2]", "shift[1, 0]", "scale"} <= set(index)
    assert len(index) == 10


@pytest.mark.long_chains
def test_loo_at_temperature_1_is_that_of_nuts():
    kernel = MHBT(logistic, control_variate=Taylor(order=2), temperature=1)
    mcmc, nuts = (
        MCMC(k, num_warmup=500, num_samples=n, progress_bar=False)
        for k, n in ((kernel, 8000), (NUTS(full_data(logistic)), 2000))
    )
    mcmc.run(random.key(0), X, y=Y)
    nuts.run(random.key(1), X, y=Y)
    ours = to_arviz(mcmc, log_likelihood=True)  # and does not warn
    theirs = az.from_numpyro(nuts, log_likelihood=True)
    found, expected = (az.loo(data, pointwise=True) for data in (ours, theirs))
    loo = [getattr(x, "elpd_loo", None) or x.elpd for x in (found, expected)]
    p_loo = [getattr(x, "p_loo", None) or x.p for x in (found, expected)]
    errors = [loo_error(data) for data in (ours, theirs)]
    assert abs(loo[0] - loo[1]) < 4 * np.hypot(*errors)
    assert np.hypot(*errors) < 0.1
    assert p_loo[0] == pytest.approx(p_loo[1], rel=0.1)


def loo_error(data):
    """
    Monte Carlo error of the elpd.

    Where weights are even, log E[1 / p] of a row is a mean, and of all rows a sum.
    """
    values = data["log_likelihood"]["y"].values
    inverse = np.exp(-values)
    total = (inverse / inverse.mean((0, 1))).sum(-1)
    ess = float(numpyro.diagnostics.effective_sample_size(total))
    return total.std() / ess**0.5


def test_draws_at_a_changing_temperature_and_of_training_are_told():
    def short(**settings):
        mcmc = MCMC(
            MHBT(logistic, **settings), num_warmup=5, num_samples=5, progress_bar=False
        )
        mcmc.run(random.key(0), X, y=Y)
        return mcmc

    cooling = short(temperature=lambda i: jnp.where(i < 8, 3.0, 1.0))
    with pytest.warns(UserWarning, match="T = 3"):
        assert to_arviz(cooling)["posterior"].attrs["temperature"] == 1
    with pytest.warns(UserWarning, match="of no posterior"):
        to_arviz(short(temperature=1, on_reject="refresh"))
    cooled = short(temperature=lambda i: jnp.where(i < 4, 3.0, 1.0))
    to_arviz(cooled)  # and does not warn


def test_what_cannot_be_converted_is_refused():
    nuts = MCMC(NUTS(logistic), num_warmup=1, num_samples=1)
    with pytest.raises(TypeError, match="to_arviz needs a run of MHBT"):
        to_arviz(nuts)


def test_names_of_flax_modules():
    """ArviZ 1.x would take the slash for a path."""

    def model(y):
        mu = numpyro.sample("net/mu", dist.Normal(0, 1))
        with numpyro.plate("N", len(y), subsample_size=BATCH) as rows:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[rows])

    mcmc = run(model, X[:, 0], temperature=1.0)
    found = to_arviz(mcmc, log_likelihood=True)
    draws = mcmc.get_samples(group_by_chain=True)["net/mu"]
    assert np.array_equal(found["posterior"]["net.mu"], draws)
    assert found["log_likelihood"]["y"].shape == (*draws.shape, ROWS)
