"""From tempered draws to the posterior, beside conjugate ones."""

from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest
from scipy import stats

from numpyro_mhbt import MHBT, Taylor, log_likelihood, untemper

N, M = 400, 100


def gaussian(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand(y.shape[1:]).to_event(1))
    numpyro.deterministic("twice", 2 * mu)
    with numpyro.plate("N", len(y), subsample_size=M):
        yb = numpyro.subsample(y, event_dim=1)
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=yb)


def bernoulli(y):
    p = numpyro.sample("p", dist.Beta(5.0, 1.0))
    with numpyro.plate("N", len(y), subsample_size=M):
        numpyro.sample("y", dist.Bernoulli(p), obs=numpyro.subsample(y, event_dim=0))


def poisson(y):
    rate = numpyro.sample("rate", dist.Gamma(3.0, 1.0))
    numpyro.sample("apart", dist.Poisson(rate), obs=4.0)
    with numpyro.plate("N", len(y), subsample_size=M) as rows:
        numpyro.sample("y", dist.Poisson(rate), obs=y[rows])


Y = 0.5 + random.normal(random.key(0), (N, 2))
COIN = jnp.asarray(np.arange(N) % 5 == 0, jnp.float32)
COUNTS = jnp.asarray(stats.poisson(2.0).rvs(N, random_state=0), jnp.float32)


def run(model, data, num_samples=4000, **settings):
    control = Taylor(order=2)
    kernel = MHBT(model, control_variate=control, steps_per_draw=2, **settings)
    mcmc = MCMC(
        kernel,
        num_warmup=num_samples // 8,
        num_samples=num_samples,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(1), data)
    return mcmc


def z_scores(draws, exact, ess):
    """Of mean and variance, in standard errors of that many independent draws."""
    mean = (draws.mean() - exact.mean()) / (exact.std() / ess**0.5)
    kurtosis = 3 + float(exact.stats("k"))
    error = exact.var() * ((kurtosis - 1) / ess) ** 0.5
    return mean, (draws.var() - exact.var()) / error


@pytest.mark.parametrize(
    "temper_prior", [True, pytest.param(False, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "temperature", [2.0, pytest.param(5.0, marks=pytest.mark.slow)]
)
def test_weights_lead_to_the_conjugate_posterior(temperature, temper_prior):
    beta = stats.beta(5 + COIN.sum(), 1 + N - COIN.sum())
    settings = {"temperature": temperature, "temper_prior": temper_prior}
    mcmc = run(bernoulli, COIN, **settings)
    found = untemper(mcmc)
    assert found.k_hat < 0.5
    assert 500 < found.ess < 8000
    assert max(map(abs, z_scores(found.samples["p"], beta, found.ess))) < 4
    # Without weights it is another distribution.
    hot = np.asarray(mcmc.get_samples()["p"])
    assert abs(z_scores(hot, beta, found.ess)[1]) > 10


def test_sites_outside_the_plate_count():
    mcmc = run(poisson, COUNTS, temperature=4.0)
    found = untemper(mcmc)
    gamma = stats.gamma(3 + 4 + COUNTS.sum(), scale=1 / (1 + 1 + N))
    assert max(map(abs, z_scores(found.samples["rate"], gamma, found.ess))) < 4


@pytest.mark.parametrize("method", ["importance", "rescale"])
def test_two_dimensions_and_what_follows_from_them(method):
    found = untemper(run(gaussian, Y, temperature=3.0), method=method)
    mean, sd = np.asarray(Y).sum(0) / (N + 1), (N + 1) ** -0.5
    ess = found.ess or 2000
    for i in range(2):
        exact = stats.norm(mean[i], sd)
        scores = z_scores(found.samples["mu"][:, i], exact, ess)
        assert max(map(abs, scores)) < 4
    expected = 2 * found.samples["mu"]
    np.testing.assert_allclose(found.samples["twice"], expected, rtol=1e-5)


def test_rescaling_is_near_where_rows_are_many():
    """A Beta posterior of 400 rows, from T = 20, where no weights would serve."""
    found = untemper(run(bernoulli, COIN, temperature=20.0), method="rescale")
    beta = stats.beta(5 + COIN.sum(), 1 + N - COIN.sum())
    draws = found.samples["p"]
    assert found.k_hat is None and found.ess is None
    assert abs(draws.mean() - beta.mean()) < 0.1 * beta.std()
    assert draws.std() == pytest.approx(beta.std(), rel=0.03)
    assert np.all((draws > 0) & (draws < 1))


def test_rescaling_leaves_a_prior_that_was_not_tempered():
    """A normal posterior, to which rescaling is exact: half the precision is prior."""
    y = Y[:, 0]

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, N**-0.5))
        with numpyro.plate("N", len(y), subsample_size=M):
            numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))

    found = untemper(
        run(model, y, temperature=9.0, temper_prior=False), method="rescale"
    )
    exact = stats.norm(float(y.mean()) / 2, (2 * N) ** -0.5)
    assert max(map(abs, z_scores(found.samples["mu"], exact, 2000))) < 4


def test_rows_in_memory_are_those_of_a_few_batches():
    seen = []

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("N", len(y), subsample_size=200) as rows:
            seen.append(rows.shape[0])
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[rows])

    y = random.normal(random.key(0), (8000,))
    mcmc = run(model, y, 500, temperature=1.5)
    seen.clear()
    untemper(mcmc)
    log_likelihood(model, {"mu": jnp.zeros(3)}, y)
    assert max(seen) == 16 * 200


def test_weights_that_collapse_are_refused():
    many = random.normal(random.key(3), (N, 30))
    mcmc = run(gaussian, many, temperature=8.0)
    with pytest.raises(ValueError, match=r"T = 8 to 1 collapse: k-hat is"):
        untemper(mcmc)


def test_the_posterior_is_left_as_it_is():
    mcmc = run(bernoulli, COIN, 800, temperature=1.0)
    found = untemper(mcmc)
    assert np.array_equal(found.samples["p"], mcmc.get_samples()["p"])
    assert found.k_hat == 0
    # Of 1600 that depend on each other.
    assert 200 < found.ess < 1600


def test_what_cannot_be_untempered_is_refused():
    nuts = MCMC(NUTS(gaussian), num_warmup=1, num_samples=1)
    with pytest.raises(TypeError, match="needs a run of MHBT"):
        untemper(nuts)
    fresh = MCMC(MHBT(bernoulli), num_warmup=1, num_samples=1)
    with pytest.raises(ValueError, match=r"call `mcmc\.run`"):
        untemper(fresh)
    cooling = run(bernoulli, COIN, 8, temperature=lambda i: 2 + 1 / (1 + i))
    with pytest.raises(ValueError, match="one temperature"):
        untemper(cooling)
    training = run(bernoulli, COIN, 8, temperature=2.0, on_reject="refresh")
    with pytest.raises(ValueError, match="refresh"):
        untemper(training)
    with pytest.raises(ValueError, match="'importance' or 'rescale'"):
        untemper(run(bernoulli, COIN, 8, temperature=2.0), method="shrink")
