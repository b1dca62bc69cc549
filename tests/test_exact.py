"""
The invariant distribution, against exact enumeration of all batches.

Six rows and batches of two: the augmented marginal is a sum over 15 batches, and its
moments come from quadrature over θ.
"""

from functools import partial
from itertools import chain, combinations, product

from chains import assert_moments, run_chains, z_score
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from numpyro_mhbt import MHBT, RSGLD, SGLD, RandomWalk, Taylor

Y = jnp.array([-2.5, -1.0, -0.3, 0.4, 1.7, 4.0])
N, M = 6, 2
FIXED = {"adapt_step_size": False, "adapt_mass_matrix": False}
PLAIN = {"control_variate": None, "bias_correction": False}


def model(y, m=M):
    mu = numpyro.sample("mu", dist.Normal(0.5, 2))
    with numpyro.plate("N", len(y), subsample_size=m) as rows:
        numpyro.sample("y", dist.Logistic(mu, 0.7), obs=y[rows])


def _expansion(grid, reference, order):
    """Taylor polynomials of the rows, with the derivatives written out."""
    half = (np.asarray(Y)[:, None] - reference) / 1.4
    step = grid - reference
    at_reference = stats.logistic.logpdf(np.asarray(Y)[:, None], reference, 0.7)
    slope = np.tanh(half) / 0.7
    bend = -1 / (2 * 0.7**2 * np.cosh(half) ** 2)
    terms = [at_reference + 0 * step, slope * step, bend * step**2 / 2]
    return sum(terms[: order + 1])


def all_batches(n, m, strata=1):
    """Every batch, as the tuples of rows that are drawn from each stratum."""
    size = n // strata
    draws = [
        combinations(range(h * size, (h + 1) * size), m // strata)
        for h in range(strata)
    ]
    return list(product(*draws))


class Exact:
    """Moments and distribution function of the marginal over all batches."""

    def __init__(
        self,
        c_n,
        reference=None,
        order=0,
        correct=False,
        m=M,
        temper_prior=True,
        strata=1,
    ):
        grid = np.linspace(-40, 40, 40_001)
        temperature = N / c_n
        rows = stats.logistic.logpdf(np.asarray(Y)[:, None], grid, 0.7)
        expansion = np.zeros_like(rows)
        if reference is not None:
            expansion = _expansion(grid, reference, order)
        prior = stats.norm.logpdf(grid, 0.5, 2) / (temperature if temper_prior else 1)
        known, missed = expansion.sum(0), rows - expansion
        batches = all_batches(N, m, strata)
        values = []
        for batch in batches:
            value = known + N * missed[list(chain(*batch))].mean(0)
            value /= temperature
            if correct:
                parts = (missed[list(rows)] for rows in batch)
                spread = sum(part.var(0, ddof=1) for part in parts)
                variance = (1 - m / N) * N**2 / m * spread / strata
                value -= variance / temperature**2 / 2
            values.append(value)
        self.batches = np.reshape(batches, (len(batches), m))
        self.values = np.array(values)  # by batch and point
        log_p = prior + special.logsumexp(values, axis=0)
        p = np.exp(log_p - log_p.max())
        self.grid, self.p = grid, p / p.sum()
        self.cdf = np.cumsum(self.p)
        self.mean = np.sum(self.p * grid)
        self.variance = np.sum(self.p * (grid - self.mean) ** 2)

    def quantile(self, u):
        return jnp.asarray(np.interp(u, self.cdf, self.grid))

    def scores(self, kernel, seed=0, y=Y, **kwargs):
        """z-scores of mean and variance, and the p-value of Kolmogorov-Smirnov."""
        num_chains = 1024
        start = self.quantile((np.arange(num_chains) + 0.5) / num_chains)
        mu = run_chains(
            kernel,
            y,
            num_chains=num_chains,
            seed=seed,
            init_params={"mu": start},
            **kwargs,
        )["mu"]
        last = stats.kstest(mu[:, -1], lambda x: np.interp(x, self.grid, self.cdf))
        square = z_score((mu - self.mean) ** 2, self.variance)
        return z_score(mu, self.mean), square, last.pvalue

    def assert_sampled_by(self, kernel, **kwargs):
        mean, variance, pvalue = self.scores(kernel, **kwargs)
        assert abs(mean) < 4
        assert abs(variance) < 4
        assert pvalue > 1e-4


PROPOSALS = {"walk": RandomWalk(1.5), "SGLD": SGLD(1.0)} | {
    f"beta{beta}_coin{coin}": RSGLD(1.0, beta, forward_prob=coin)
    for beta in (1.0, 1.5, 3.0)
    for coin in (0.5, 0.8)
}


def _cases():
    """All at the coldest, and some at other temperatures, in the default run."""
    for name in PROPOSALS:
        for c_n in (1.0, 3.0, 6.0):
            always = c_n == 6.0 or (c_n == 1.0 and name in ("walk", "beta1.5_coin0.5"))
            marks = [] if always else pytest.mark.slow
            yield pytest.param(name, c_n, marks=marks, id=f"{name}-{c_n}")


@pytest.mark.parametrize(("proposal", "c_n"), list(_cases()))
def test_every_proposal_samples_the_augmented_marginal(proposal, c_n):
    kernel = MHBT(model, PROPOSALS[proposal], c_n=c_n, **PLAIN, **FIXED)
    Exact(c_n).assert_sampled_by(kernel)


@pytest.mark.parametrize("proposal", ["walk", "beta1.5_coin0.5"])
def test_control_variate_of_order_0(proposal):
    control = Taylor(order=0, ref_params={"mu": jnp.array(0.3)})
    kernel = MHBT(
        model,
        PROPOSALS[proposal],
        c_n=3.0,
        control_variate=control,
        bias_correction=False,
        **FIXED,
    )
    exact = Exact(3.0, reference=0.3)
    assert abs(exact.variance / Exact(3.0).variance - 1) > 0.2  # it matters here
    exact.assert_sampled_by(kernel)


def expanded(order):
    if order is None:
        return None
    return Taylor(order, ref_params={"mu": jnp.array(0.3)})


@pytest.mark.parametrize("proposal", ["walk", "beta1.5_coin0.5"])
@pytest.mark.parametrize(
    "order, m, c_n", [(None, 2, 3.0), (0, 2, 3.0), (1, 5, 1.0), (2, 5, 1.0)]
)
def test_bias_correction_with_every_order(order, m, c_n, proposal):
    kernel = MHBT(
        partial(model, m=m),
        PROPOSALS[proposal],
        c_n=c_n,
        control_variate=expanded(order),
        **FIXED,
    )
    spec = (c_n, None, 0) if order is None else (c_n, 0.3, order)
    exact = Exact(*spec, correct=True, m=m)
    assert abs(Exact(*spec, m=m).variance / exact.variance - 1) > 0.02  # it matters
    exact.assert_sampled_by(kernel)


@pytest.mark.parametrize("order", [1, 2])
def test_orders_without_bias_correction(order):
    kernel = MHBT(
        partial(model, m=5),
        SGLD(1.0),
        c_n=3.0,
        control_variate=expanded(order),
        bias_correction=False,
        **FIXED,
    )
    Exact(3.0, 0.3, order, m=5).assert_sampled_by(kernel)


@pytest.mark.parametrize("num_blocks", [2, 3])
@pytest.mark.parametrize("proposal", ["walk", "SGLD"])
def test_blocks_have_the_same_target(proposal, num_blocks):
    """Batches of four, so that three blocks do not divide them."""
    kernel = MHBT(
        partial(model, m=4),
        PROPOSALS[proposal],
        c_n=6.0,
        num_blocks=num_blocks,
        **PLAIN,
        **FIXED,
    )
    Exact(6.0, m=4).assert_sampled_by(kernel)


def test_temper_prior_off():
    kernel = MHBT(
        model,
        RSGLD(1.0),
        c_n=1.0,
        **PLAIN,
        temper_prior=False,
        **FIXED,
    )
    Exact(1.0, temper_prior=False).assert_sampled_by(kernel)


def test_several_steps_per_draw():
    kernel = MHBT(model, RSGLD(1.0), c_n=3.0, **PLAIN, steps_per_draw=3, **FIXED)
    Exact(3.0).assert_sampled_by(kernel, draws=200)


@pytest.mark.parametrize("dense_mass", [False, True])
def test_adapted_step_size_and_mass_matrix(dense_mass):
    """Whatever warm-up settles on, the target stays the same."""
    kernel = MHBT(model, RSGLD(0.2, 1.5), c_n=6.0, **PLAIN, dense_mass=dense_mass)
    Exact(6.0).assert_sampled_by(kernel, burn=500)


@pytest.mark.slow
def test_paper_noise_has_the_same_target():
    kernel = MHBT(
        model,
        RSGLD(5.0, 1.5, noise="paper"),
        c_n=3.0,
        **PLAIN,
        steps_per_draw=5,
        **FIXED,
    )
    # It mixes poorly, and chains start at batches that know nothing of the point.
    Exact(3.0).assert_sampled_by(kernel, burn=6000, draws=100)


def test_paper_hastings_has_another_target():
    """Without β^-d the chain is as reversible, but not towards the tempered target."""
    proposal = RSGLD(1.0, 3.0, forward_prob=0.5, hastings="paper")
    kernel = MHBT(model, proposal, c_n=6.0, **PLAIN, **FIXED)
    _, variance, _ = Exact(6.0).scores(kernel)
    assert variance < -8


def test_refresh_on_reject_has_another_target():
    kernel = MHBT(
        model,
        RSGLD(1.0),
        c_n=6.0,
        **PLAIN,
        on_reject="refresh",
        **FIXED,
    )
    _, variance, _ = Exact(6.0).scores(kernel)
    assert abs(variance) > 8


def pair_model(y):
    """Two latent sites of different scale, so that a mass matrix has work to do."""
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    log_scale = numpyro.sample("log_scale", dist.Normal(0, 0.3))
    with numpyro.plate("N", len(y), subsample_size=M) as rows:
        numpyro.sample("y", dist.Logistic(mu, jnp.exp(log_scale)), obs=y[rows])


@pytest.mark.parametrize("dense_mass", [False, True])
def test_two_dimensions_with_a_mass_matrix(dense_mass):
    mu, s = np.meshgrid(np.linspace(-12, 12, 481), np.linspace(-2.5, 2.5, 401))
    rows = stats.logistic.logpdf(np.asarray(Y)[:, None, None], mu, np.exp(s))
    prior = stats.norm.logpdf(mu, 0, 2) + stats.norm.logpdf(s, 0, 0.3)
    batches = [N / M * rows[list(b)].sum(0) for b in combinations(range(N), M)]
    log_p = special.logsumexp((np.array(batches) + prior) / 2.0, axis=0)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    kernel = MHBT(
        pair_model,
        RSGLD(0.3, 1.5),
        temperature=2.0,
        **PLAIN,
        dense_mass=dense_mass,
    )
    draws = run_chains(kernel, Y, burn=500)
    for site, grid in (("mu", mu), ("log_scale", s)):
        mean = np.sum(p * grid)
        assert_moments(draws[site], mean, np.sum(p * (grid - mean) ** 2))
    cross = np.sum(p * mu * s)
    assert abs(z_score(draws["mu"] * draws["log_scale"], cross)) < 4


def geweke_model(y):
    """With T = n / m a row of the batch counts once: log p(y | mu) - log h(y)."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("N", N, subsample_size=M) as rows:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[rows])
        numpyro.factor("h", -dist.Normal(0, 2).log_prob(y[rows]))


@pytest.mark.parametrize("proposal", [RandomWalk(1.0), RSGLD(0.5, 1.5)], ids=str)
def test_geweke_joint_distribution(proposal):
    """
    Rows of the batch are drawn from the model, all others from h; then the joint
    density of (mu, batch, y) has exactly the kernel's conditional. Alternating a step
    of the kernel with a new y must leave mu at its prior and batches uniform.
    """
    kernel = MHBT(
        geweke_model,
        proposal,
        temperature=N / M,
        temper_prior=False,
        **PLAIN,
        **FIXED,
    )

    def new_y(key, state):
        inside = jnp.isin(jnp.arange(N), state.batch["N"])
        noise = random.normal(key, (N,))
        return jnp.where(inside, state.z["mu"] + noise, 2 * noise)

    def cycle(carry, key):
        state, y = carry
        state = kernel.sample(kernel.refresh(state, (y,), {}), (y,), {})
        return (state, new_y(key, state)), (state.z["mu"], state.batch["N"], y)

    def chain(key, state):
        carry = (state, new_y(key, state))
        return jax.lax.scan(cycle, carry, random.split(key, 700))[1]

    num_chains = 512
    keys = random.split(random.key(1), num_chains)
    state = kernel.init(
        keys, 0, {"mu": random.normal(keys[0], (num_chains,))}, (Y,), {}
    )
    mu, batch, y = jax.jit(jax.vmap(chain))(keys, state)
    mu, batch, y = (np.asarray(x, np.float64)[:, 200:] for x in (mu, batch, y))
    for values, expected in (
        (mu, 0.0),
        (mu**2, 1.0),
        (mu**4, 3.0),
        (np.any(batch == 0, -1), M / N),
        (np.any(batch == 5, -1), M / N),
        (np.all((batch == 0) | (batch == 5), -1), 1 / 15),
        (mu * y[..., 0], M / N),
        (y[..., 3] ** 2, M / N * 2 + (1 - M / N) * 4),
    ):
        assert abs(z_score(values, expected)) < 4
