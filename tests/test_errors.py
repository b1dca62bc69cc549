"""Bad input is told with its name and the way out, before the first step."""

from functools import cache, partial
import re

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, init_to_value
from numpyro.infer.util import potential_energy
import pytest

from numpyro_mhbt import MHBT, RSGLD, SGLD, RandomWalk, Taylor, full_data
from numpyro_mhbt.checks import nan_rows
from numpyro_mhbt.setup import read

ROWS, BATCH = 100, 20
RNG = np.random.default_rng(0)
X = RNG.normal(size=ROWS).astype(np.float32)
Y = (0.5 * X + RNG.normal(size=ROWS)).astype(np.float32)
METHODS = ["vectorized", "sequential"]
TOP = {"top": 2.0}
# For models with a hard edge, where it is as it should be.
DIVERGES = pytest.mark.filterwarnings("ignore:MHBT. ..% of all proposals")


def regression(x, y, subsample_size=BATCH):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("N", len(x), subsample_size=subsample_size):
        xb, yb = numpyro.subsample(x, 0), numpyro.subsample(y, 0)
        numpyro.sample("y", dist.Normal(w * xb, 1), obs=yb)


def masked(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("N", len(x), subsample_size=BATCH):
        xb, yb = numpyro.subsample(x, 0), numpyro.subsample(y, 0)
        with numpyro.handlers.mask(mask=~jnp.isnan(yb)):
            numpyro.sample("y", dist.Normal(w * xb, 1), obs=yb)


def with_header(header, x, y):
    numpyro.sample("header", dist.Normal(0, 1), obs=header)
    regression(x, y)


def bounded(y):
    top = numpyro.sample("top", dist.LogNormal(0, 1))
    with numpyro.plate("N", len(y), subsample_size=BATCH):
        numpyro.sample("y", dist.Uniform(0, top), obs=numpyro.subsample(y, 0))


def discrete(y):
    k = numpyro.sample("k", dist.Bernoulli(0.5))
    with numpyro.plate("N", len(y), subsample_size=BATCH):
        numpyro.sample("y", dist.Normal(k, 1), obs=numpyro.subsample(y, 0))


def latent_by_row(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("people", len(y), subsample_size=BATCH):
        effect = numpyro.sample("effect", dist.Normal(0, scale))
        numpyro.sample("y", dist.Normal(effect, 1), obs=numpyro.subsample(y, 0))


def pitfall(y, value=jnp.nan):
    """The log-density is not finite (or has no gradient) above 0.8."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.factor("pit", jnp.where(mu > 0.8, value, 0.0) * mu)
    with numpyro.plate("N", len(y), subsample_size=BATCH):
        numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))


def run(kernel, *args, method="vectorized", num_chains=1, **options):
    mcmc = MCMC(
        kernel,
        num_warmup=options.pop("num_warmup", 50),
        num_samples=options.pop("num_samples", 50),
        num_chains=num_chains,
        chain_method=method,
        progress_bar=False,
    )
    mcmc.run(random.key(0), *args, **options)
    return mcmc


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: MHBT(), ["model"]),
        (lambda: MHBT(None, RandomWalk()), ["model"]),
        (
            lambda: MHBT(regression, c_n=20, temperature=5),
            ["c_n=20", "temperature=5"],
        ),
        (lambda: MHBT(regression, c_n=0), ["`c_n`", "positive", "got 0"]),
        (lambda: MHBT(regression, c_n=-3.5), ["`c_n`", "positive", "got -3.5"]),
        (lambda: MHBT(regression, c_n=np.inf), ["`c_n`", "finite", "got inf"]),
        (lambda: MHBT(regression, c_n=np.nan), ["`c_n`", "finite", "got nan"]),
        (lambda: MHBT(regression, temperature=0), ["`temperature`", "got 0"]),
        (lambda: MHBT(regression, temperature=-2), ["`temperature`", "got -2"]),
        (lambda: MHBT(regression, temperature=np.nan), ["`temperature`", "got nan"]),
        (
            lambda: MHBT(regression, on_reject="drop"),
            ["`on_reject`", "'keep' or 'refresh'", "got 'drop'"],
        ),
        (lambda: MHBT(regression, steps_per_draw=0), ["`steps_per_draw`", "got 0"]),
        (lambda: MHBT(regression, num_blocks=0), ["`num_blocks`", "got 0"]),
        (
            lambda: MHBT(regression, share_batches=True, num_blocks=2),
            ["`share_batches=True`", "num_blocks=2"],
        ),
        (lambda: MHBT(regression, target_noise=-1), ["`target_noise`", "got -1"]),
        (
            lambda: MHBT(regression, target_accept_prob=2),
            ["`target_accept_prob`", "between 0 and 1", "got 2"],
        ),
        (lambda: Taylor(order=3), ["order must be 0, 1 or 2", "got 3"]),
        (lambda: RSGLD(noise="white"), ["RSGLD", "noise", "got 'white'"]),
        (lambda: RSGLD(hastings="no"), ["RSGLD", "hastings", "got 'no'"]),
        (lambda: RSGLD(beta=0.5), ["RSGLD", "beta", "at least 1", "got 0.5"]),
        (lambda: RSGLD(beta=np.nan), ["RSGLD", "beta", "got nan"]),
        (lambda: RSGLD(step_size=0), ["RSGLD", "step_size", "positive", "got 0"]),
        (lambda: RSGLD(2.0), ["RSGLD", "step_size", "at most 1", "got 2.0"]),
        (lambda: RSGLD(forward_prob=0), ["RSGLD", "forward_prob", "got 0"]),
        (lambda: RSGLD(forward_prob=1.5), ["RSGLD", "forward_prob", "got 1.5"]),
        (lambda: SGLD(noise="white"), ["SGLD", "noise", "got 'white'"]),
        (lambda: SGLD(-1.0), ["SGLD", "step_size", "got -1.0"]),
        (lambda: RandomWalk(0.0), ["RandomWalk", "step_size", "got 0.0"]),
        (lambda: Taylor(order=-1), ["Taylor", "order", "got -1"]),
        (lambda: Taylor(order=3), ["Taylor", "order", "got 3"]),
    ],
)
def test_bad_options(make, words):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        make()
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    "options, words",
    [
        ({"proposal": "rsgld"}, ["`proposal`", "`RSGLD()`", "got 'rsgld'"]),
        ({"proposal": RSGLD}, ["`proposal`", "`RSGLD()`"]),
        ({"control_variate": 0}, ["`control_variate`", "`Taylor(order=0)`", "got 0"]),
        ({"c_n": "20"}, ["`c_n`", "number", "got '20'"]),
        ({"steps_per_draw": 2.5}, ["`steps_per_draw`", "integer", "got 2.5"]),
        ({"num_blocks": "two"}, ["`num_blocks`", "integer", "got 'two'"]),
    ],
)
def test_arguments_of_the_wrong_type(options, words):
    with pytest.raises(TypeError) as error:
        MHBT(regression, **options)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("method", ["parallel", jax.vmap])
def test_start_without_density_where_values_are_traced(method):
    with pytest.raises(Exception, match="initial point has zero density"):
        mcmc = run(
            MHBT(bounded, temperature=2.0, init_strategy=init_to_value(values=TOP)),
            jnp.linspace(0.1, 1.0, ROWS),
            method=method,
            num_chains=2,
            init_params={"top": jnp.array([-5.0, -5.0])},
        )
        jax.block_until_ready(mcmc.get_samples())


def test_batch_of_one_row_does_not_claim_to_know_its_noise():
    with pytest.warns(UserWarning, match="subsample_size=1"):
        mcmc = run(
            MHBT(regression),
            X,
            Y,
            subsample_size=1,
            extra_fields=("noise_variance", "temperature"),
        )
    fields = mcmc.get_extra_fields()
    assert np.all(np.isnan(fields["noise_variance"]))
    assert np.all(np.isfinite(mcmc.get_samples()["w"]))
    assert fields["temperature"][0] > 20  # chosen all the same, from more rows


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "kernel, args, words",
    [
        (
            MHBT(regression, c_n=250),
            (X, Y),
            ["c_n = 250", "rows n = 100", "temperature of 0.4"],
        ),
        (MHBT(regression, temperature=0.5), (X, Y), ["temperature of 0.5", "n = 100"]),
        (
            MHBT(regression),
            (X, Y, ROWS + 1),
            ["'N'", "subsample_size=101", "size 100"],
        ),
        (MHBT(regression), (X, Y, 0), ["'N'", "subsample_size=0", "size 100"]),
        (MHBT(discrete), (Y,), ["'k'", "discrete", "Marginalise"]),
        (MHBT(latent_by_row), (Y,), ["'effect'", "'people'", "Move it out"]),
    ],
    ids=["c_n", "temperature", "large-batch", "empty-batch", "discrete", "latent"],
)
def test_bad_models(kernel, args, words, method):
    with pytest.raises(ValueError, match=re.escape(words[0])) as error:
        run(kernel, *args, method=method, num_chains=2)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("method", [*METHODS, "parallel"])
@pytest.mark.parametrize("column", ["x", "y"])
def test_one_missing_value_in_many_rows(column, method):
    data = {"x": np.ones(50_000, np.float32), "y": np.zeros(50_000, np.float32)}
    data[column][41_234] = np.nan
    kernel = MHBT(regression, control_variate=None)
    with pytest.raises(ValueError, match="'y' is NaN at row 41234 of plate 'N'"):
        run(kernel, **data, method=method, num_chains=2)


LIKELIHOODS = {
    "Bernoulli": lambda x: dist.Bernoulli(logits=x),
    "several outcomes": lambda x: dist.Bernoulli(logits=x[..., None] * jnp.ones(3)),
    "Categorical": lambda x: dist.Categorical(logits=jnp.stack([x, 0 * x], -1)),
    "probabilities": lambda x: dist.Categorical(
        probs=jax.nn.softmax(jnp.stack([x, 0 * x], -1))
    ),
    "OrderedLogistic": lambda x: dist.OrderedLogistic(x, jnp.array([-1.0, 1.0])),
    "Poisson": lambda x: dist.Poisson(jnp.exp(x)),
    "Normal": lambda x: dist.Normal(x, 1),
    "StudentT": lambda x: dist.StudentT(3, x, 1),
    "mixture": lambda x: dist.MixtureSameFamily(
        dist.Categorical(probs=jnp.ones(2) / 2),
        dist.Normal(jnp.stack([x, x + 1], -1), 1),
    ),
}


def generalised(x, y, likelihood, mask=True):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("N", len(x), subsample_size=BATCH) as rows:
        fn = LIKELIHOODS[likelihood](w * x[rows])
        obs = jnp.asarray(y, float if fn.support is dist.constraints.real else int)
        obs = jnp.broadcast_to(obs, fn.batch_shape)
        if likelihood == "several outcomes":
            fn = fn.to_event(1)
        fn = fn if mask is True else fn.mask(mask[rows])
        numpyro.sample("y", fn, obs=obs)


@pytest.mark.parametrize("y", [0, 1])
@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_missing_covariate_is_found_under_every_likelihood(likelihood, y):
    """Some have a density all the same: NumPyro's Bernoulli takes NaN for odds of 0."""
    x = X.copy()
    x[77] = np.nan
    for values, mask, row in [(X, True, -1), (x, True, 77), (x, ~np.isnan(x), -1)]:
        mask = mask if mask is True else jnp.asarray(mask)
        model = partial(generalised, likelihood=likelihood, mask=mask)
        data, _ = read(model, (values, y), {})
        found = nan_rows(model, data, {"w": jnp.array(0.5)})
        assert np.max(found["N"]["y"]) == row


@pytest.mark.parametrize("y", [0, 1])
def test_missing_covariate_of_a_binary_outcome(y):
    x = np.ones(5000, np.float32)
    x[4123] = np.nan
    with pytest.raises(ValueError, match="'y' is NaN at row 4123 of plate 'N'"):
        run(MHBT(generalised, control_variate=None), x, y, likelihood="Bernoulli")


def test_missing_covariate_outside_the_plates():
    def model(odds):
        bias = numpyro.sample("bias", dist.Normal(0, 1))
        numpyro.sample("coin", dist.Bernoulli(logits=bias * odds), obs=0)
        regression(X, Y)

    with pytest.raises(ValueError, match=r"NaN.*'coin'"):
        run(MHBT(model, control_variate=None), jnp.array(jnp.nan))


def test_all_values_missing():
    with pytest.raises(ValueError, match=r"NaN.*'y'"):
        run(MHBT(regression, control_variate=None), X, np.full_like(Y, np.nan))


def test_missing_value_outside_the_plates():
    with pytest.raises(ValueError, match=r"NaN.*'header'"):
        run(MHBT(with_header, control_variate=None), jnp.array(jnp.nan), X, Y)


def test_masked_missing_value_is_no_error():
    y = Y.copy()
    y[::7] = np.nan
    mcmc = run(MHBT(masked, temperature=5), X, y, extra_fields=("accepted",))
    assert np.all(np.isfinite(mcmc.get_samples()["w"]))
    assert not np.any(mcmc.get_extra_fields()["diverging"])
    assert np.sum(mcmc.get_extra_fields()["accepted"]) > 5


@DIVERGES
@pytest.mark.parametrize("method", METHODS)
def test_init_params_without_density(method):
    kernel = MHBT(bounded, control_variate=None)
    with pytest.raises(ValueError, match=r"zero density.*'y'.*`init_params`"):
        run(
            kernel,
            np.abs(Y) + 1,
            method=method,
            num_chains=2,
            init_params={"top": jnp.array([9.0, 0.0])},
        )


def test_start_where_a_climb_ended_without_density(monkeypatch):
    """The point it began at is known to have one."""
    away = lambda key, z, *rest: jnp.full_like(ravel_pytree(z)[0], jnp.inf)  # noqa: E731
    monkeypatch.setattr("numpyro_mhbt.chain.climb", away)
    kernel = MHBT(masked, temperature=5)
    state = kernel.init(random.key(0), 10, None, (X, Y), {})
    assert jnp.isfinite(state.log_density) and jnp.all(jnp.isfinite(state.z_grad))


def test_init_strategy_without_density():
    kernel = MHBT(bounded, init_strategy=init_to_value(values={"top": 1.0}))
    with pytest.raises(ValueError, match=r"zero density.*'y'.*`init_strategy`"):
        run(kernel, np.abs(Y) + 1)


@pytest.mark.parametrize("names", [["v"], ["v", "w"]], ids=["other", "more"])
def test_init_params_of_other_sites(names):
    init_params = {name: jnp.array(0.0) for name in names}
    with pytest.raises(ValueError, match=re.escape(f"['w'], got {names}")) as error:
        run(MHBT(regression, control_variate=None), X, Y, init_params=init_params)
    assert "`init_params`" in str(error.value)


def test_ref_params_of_other_sites():
    kernel = MHBT(regression, control_variate=Taylor(ref_params={"v": 0.0}))
    with pytest.raises(ValueError, match=r"`ref_params`.*\['w'\], got \['v'\]"):
        run(kernel, X, Y)


@DIVERGES
@pytest.mark.parametrize("control", [Taylor(), Taylor(ref_params={"top": 1.0})])
def test_reference_without_density(control):
    """Where the reference has no density, nothing is subtracted."""
    kernel = MHBT(bounded, control_variate=control, temperature=5)
    start = {"top": jnp.array(9.0)}
    mcmc = run(kernel, np.abs(Y) + 1, init_params=start, extra_fields=["accepted"])
    assert np.sum(mcmc.get_extra_fields()["accepted"]) > 2


@cache
def pitfall_mcmc():
    mcmc = MCMC(
        MHBT(pitfall, RandomWalk(1.0), c_n=5, adapt_step_size=False),
        num_warmup=50,
        num_samples=300,
        jit_model_args=True,
    )
    mcmc.progress_bar = True  # so that the step is compiled once for all three values
    return mcmc


@DIVERGES
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_proposal_without_finite_value_is_rejected_and_counted(value):
    mcmc = pitfall_mcmc()
    mcmc.run(
        random.key(0),
        jnp.asarray(Y) + 0.5,
        jnp.asarray(value),
        init_params={"mu": jnp.array(0.0)},
        extra_fields=("accepted", "accept_prob", "potential_energy", "noise_variance"),
    )
    draws, fields = mcmc.get_samples()["mu"], mcmc.get_extra_fields()
    diverging = np.asarray(fields["diverging"])
    assert 5 < diverging.sum() < 295
    assert np.all(fields["accepted"][diverging] == 0)
    assert np.all(fields["accept_prob"][diverging] == 0)
    for values in (draws, *fields.values()):
        assert np.all(np.isfinite(values))
    assert np.all(draws <= 0.8)
    assert np.unique(draws).size > 30
    assert np.any(fields["accepted"][np.flatnonzero(diverging)[:-1] + 1] == 1)


@DIVERGES
def test_gradient_proposal_survives_a_pitfall():
    mcmc = run(
        MHBT(pitfall, RSGLD(0.3), c_n=5, adapt_step_size=False),
        Y + 0.5,
        num_samples=300,
        init_params={"mu": jnp.array(0.0)},
    )
    draws = mcmc.get_samples()["mu"]
    assert np.any(mcmc.get_extra_fields()["diverging"])
    assert np.all(draws <= 0.8)
    assert np.unique(draws).size > 30


def test_batch_of_all_rows_is_plain_metropolis_hastings():
    mcmc = run(
        MHBT(regression),
        X,
        Y,
        subsample_size=ROWS,
        num_warmup=500,
        num_samples=4000,
        extra_fields=("noise_variance", "temperature", "potential_energy", "z.w"),
    )
    draws, fields = mcmc.get_samples()["w"], mcmc.get_extra_fields()
    assert np.all(fields["noise_variance"] == 0)
    assert np.all(fields["temperature"] == 1)
    precision = 1 + X @ X
    assert np.mean(draws) == pytest.approx(X @ Y / precision, abs=0.02)
    assert np.std(draws) == pytest.approx(precision**-0.5, rel=0.1)
    expected = jax.vmap(
        lambda w: potential_energy(full_data(regression), (X, Y), {}, {"w": w})
    )(fields["z.w"][:20])
    np.testing.assert_allclose(fields["potential_energy"][:20], expected, rtol=1e-4)


def test_sizes_among_traced_arguments():
    mcmc = MCMC(
        MHBT(regression),
        num_warmup=5,
        num_samples=5,
        jit_model_args=True,
        progress_bar=False,
    )
    with pytest.raises(TypeError, match=r"jit_model_args.*Bind it before"):
        mcmc.run(random.key(0), X, Y, BATCH)
