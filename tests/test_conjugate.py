"""Conjugate posteriors raised to 1/T, in the constrained space, and a NUTS run."""

from chains import assert_moments, run_chains, z_score
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest
from scipy import stats

from numpyro_mhbt import MHBT, RSGLD, RandomWalk, full_data

RNG = np.random.default_rng(0)
COUNTS = RNG.poisson(3.0, 40)
COINS = RNG.random(40) < 0.3
REALS = RNG.normal(1.0, 1.5, 40)
LABELS = RNG.choice(3, 40, p=[0.6, 0.3, 0.1])
TEMPERATURES = [1.0, 8.0]


def gamma_poisson(y, m):
    rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("N", len(y), subsample_size=m):
        numpyro.sample("y", dist.Poisson(rate), obs=numpyro.subsample(y, 0))


def tempered_gamma(y, t):
    return stats.gamma((2.0 - 1 + y.sum()) / t + 1, scale=t / (1.0 + len(y)))


def beta_bernoulli(y, m):
    p = numpyro.sample("p", dist.Beta(2.0, 3.0))
    with numpyro.plate("N", len(y), subsample_size=m):
        numpyro.sample("y", dist.Bernoulli(probs=p), obs=numpyro.subsample(y, 0))


def tempered_beta(y, t):
    ones = y.sum()
    return stats.beta((2.0 - 1 + ones) / t + 1, (3.0 - 1 + len(y) - ones) / t + 1)


def normal_inverse_gamma(y, m):
    var = numpyro.sample("var", dist.InverseGamma(3.0, 4.0))
    mu = numpyro.sample("mu", dist.Normal(0.5, jnp.sqrt(var / 2.0)))
    with numpyro.plate("N", len(y), subsample_size=m):
        obs = numpyro.subsample(y, 0)
        numpyro.sample("y", dist.Normal(mu, jnp.sqrt(var)), obs=obs)


def tempered_inverse_gamma(y, t):
    """Marginals of var, and of mu given the scale of var."""
    n, kappa = len(y), 2.0 + len(y)
    centre = (2.0 * 0.5 + y.sum()) / kappa
    b = 4.0 + 0.5 * np.sum(y**2) + 0.5 * 2.0 * 0.5**2 - 0.5 * kappa * centre**2
    a = (3.0 + 1.5 + n / 2) / t - 1.5
    var = stats.invgamma(a, scale=b / t)
    return var, stats.t(2 * a, loc=centre, scale=np.sqrt(b / a / kappa))


def dirichlet_categorical(y, m):
    p = numpyro.sample("p", dist.Dirichlet(jnp.array([2.0, 1.5, 3.0])))
    with numpyro.plate("N", len(y), subsample_size=m):
        numpyro.sample("y", dist.Categorical(p), obs=numpyro.subsample(y, 0))


@pytest.mark.parametrize("t", TEMPERATURES)
def test_gamma_poisson(t):
    draws = run_chains(MHBT(gamma_poisson, RSGLD(), temperature=t), COUNTS, 40)
    exact = tempered_gamma(COUNTS, t)
    assert_moments(draws["rate"], exact.mean(), exact.var())


@pytest.mark.parametrize("t", TEMPERATURES)
def test_beta_bernoulli(t):
    y = COINS.astype(np.float32)
    draws = run_chains(MHBT(beta_bernoulli, RSGLD(), temperature=t), y, 40)
    exact = tempered_beta(y, t)
    assert_moments(draws["p"], exact.mean(), exact.var())


@pytest.mark.parametrize("t", [pytest.param(1.0, marks=pytest.mark.slow), 3.0])
def test_normal_inverse_gamma(t):
    kernel = MHBT(normal_inverse_gamma, RSGLD(), temperature=t)
    draws = run_chains(kernel, REALS, 40, draws=1500)
    var, mu = tempered_inverse_gamma(REALS, t)
    log_var = np.log(draws["var"])  # its moments are finite at every temperature
    exact = np.log(var.rvs(4_000_000, random_state=1))
    assert_moments(log_var, exact.mean(), exact.var(), slack=0.002)
    assert_moments(draws["mu"], mu.mean(), mu.var())


@pytest.mark.parametrize("t", TEMPERATURES)
def test_dirichlet_categorical(t):
    draws = run_chains(MHBT(dirichlet_categorical, RSGLD(), temperature=t), LABELS, 40)
    alpha = np.array([2.0, 1.5, 3.0]) - 1 + np.bincount(LABELS, minlength=3)
    exact = stats.dirichlet(alpha / t + 1)
    assert_moments(draws["p"], exact.mean(), exact.var())


@pytest.mark.long_chains
@pytest.mark.parametrize(
    "proposal",
    [RSGLD(), pytest.param(RandomWalk(), marks=pytest.mark.slow)],
    ids=["RSGLD", "RandomWalk"],
)
def test_mini_batches_where_the_bias_is_negligible(proposal):
    """
    Order 0 inflates the spread by (1 - m/n) c / m (first order) at this size: half a
    percent of the variance, which the bound allows for.
    """
    y = np.random.default_rng(1).poisson(3.0, 2000)
    kernel = MHBT(gamma_poisson, proposal, c_n=10.0)
    draws = run_chains(kernel, y, 1000, num_chains=256)
    exact = tempered_gamma(y, 200.0)
    mean = draws["rate"].mean()
    assert abs(mean / exact.mean() - 1) < 0.01
    assert_moments(draws["rate"], mean, exact.var(), slack=0.01)


def logistic(x, y, m):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("N", len(x), subsample_size=m):
        xb, yb = numpyro.subsample(x, 1), numpyro.subsample(y, 0)
        numpyro.sample("y", dist.Bernoulli(logits=xb @ w), obs=yb)


@pytest.mark.long_chains
def test_all_rows_at_temperature_one_agree_with_nuts():
    x = random.normal(random.key(0), (100, 3))
    y = random.bernoulli(random.key(1), jax.nn.sigmoid(x @ jnp.array([1.0, -1, 0.5])))
    y = y.astype(jnp.float32)
    kernel = MHBT(logistic, RSGLD(), temperature=1.0)
    ours = run_chains(kernel, x, y, 100, num_chains=256, draws=1000)["w"]
    nuts = MCMC(
        NUTS(full_data(logistic)),
        num_warmup=500,
        num_samples=1000,
        num_chains=16,
        chain_method="vectorized",
        progress_bar=False,
    )
    nuts.run(random.key(2), x, y, 100)
    theirs = np.asarray(nuts.get_samples(group_by_chain=True)["w"], np.float64)
    for f in (lambda w: w, lambda w: w**2, lambda w: w[..., :1] * w):
        a, b = f(ours).mean(1), f(theirs).mean(1)
        error = np.sqrt(a.var(0, ddof=1) / len(a) + b.var(0, ddof=1) / len(b))
        assert np.all(np.abs(a.mean(0) - b.mean(0)) < 4 * error)


def test_scores_see_a_difference_of_two_percent():
    """The bounds above are tight enough to fail."""
    draws = run_chains(MHBT(gamma_poisson, RSGLD(), temperature=8.0), COUNTS, 40)
    exact = tempered_gamma(COUNTS, 8.0)
    assert abs(z_score(draws["rate"], 1.02 * exact.mean())) > 4
