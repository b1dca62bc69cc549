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
from numpyro.infer import MCMC, Predictive, init_to_uniform, init_to_value
import pytest

from numpyro_mhbt import MHBT, full_data

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


def run(model, *args, init_strategy=init_to_uniform, **options):
    mcmc = MCMC(
        MHBT(model, temperature=10, init_strategy=init_strategy),
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
def to_arviz():
    return az.from_numpyro(run_logistic(), log_likelihood=True)


@cache
def run_improper():
    start = init_to_value(values={"w": jnp.zeros(2), "scale": 1.0})
    return run(improper, X, Y.astype(np.float32), init_strategy=start)


def log_likelihood(w):
    logits = np.asarray(w) @ X.T
    return Y * logits - np.log1p(np.exp(logits))


def test_posterior():
    posterior = to_arviz()["posterior"]
    assert set(posterior.data_vars) == {"w"}
    assert posterior["w"].shape == (2, 30, 2)
    draws = run_logistic().get_samples(group_by_chain=True)["w"]
    np.testing.assert_array_equal(posterior["w"].values, draws)


def test_observed_data_are_all_rows_in_order():
    observed = to_arviz()["observed_data"]
    assert observed["y"].dims == ("N",)
    np.testing.assert_array_equal(observed["y"].values, Y)


def test_sample_stats_have_every_field():
    stats, fields = to_arviz()["sample_stats"], run_logistic().get_extra_fields(True)
    assert set(stats.data_vars) == set(FIELDS.values())
    for ours, theirs in FIELDS.items():
        sign = -1 if theirs == "lp" else 1
        np.testing.assert_array_equal(stats[theirs].values, sign * fields[ours])
        assert stats[theirs].dims == ("chain", "draw")
    assert stats["diverging"].dtype == bool


def test_log_likelihood_is_of_all_rows():
    values = to_arviz()["log_likelihood"]["y"].values
    expected = log_likelihood(run_logistic().get_samples(group_by_chain=True)["w"])
    assert values.shape == (2, 30, ROWS)
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-5)


def test_summary_and_trace_plot():
    summary = az.summary(to_arviz())
    assert list(summary.index) == ["w[0]", "w[1]"]
    az.plot_trace(to_arviz())
    matplotlib.pyplot.close("all")


def test_unpickled_run_converts_alike():
    idata = az.from_numpyro(pickle.loads(pickle.dumps(run_logistic())))
    for group, name in (("posterior", "w"), ("observed_data", "y")):
        np.testing.assert_array_equal(
            idata[group][name].values, to_arviz()[group][name].values
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
