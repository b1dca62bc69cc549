"""
Likelihoods and data that are out of order: the right answer, or it is said.

What a chain has to sample comes from exact enumeration (see ``test_exact``), from
conjugate posteriors, or from both.
"""

from functools import partial
from itertools import product
import re
import warnings

from chains import assert_moments
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest
from test_exact import Exact, Y
from test_exact import model as logistic

from numpyro_mhbt import MHBT, RSGLD, SGLD, RandomWalk, Taylor, batch_report

ORDERS = [None, 0, 1, 2]
REFERENCE = {"mu": jnp.array(0.3)}
CHAINS = 256
FIXED = {"adapt_step_size": False, "adapt_mass_matrix": False}
slow = pytest.mark.slow


def some_slow(always):
    """Every order, all but one at night only."""
    return [pytest.param(k, marks=[] if k == always else slow) for k in ORDERS]


def control(order, **options):
    return None if order is None else Taylor(order, **options)


def run(
    kernel,
    *args,
    num_warmup=300,
    num_samples=400,
    num_chains=CHAINS,
    state=None,
    **options,
):
    """:param state: to go on from, in place of warm-up."""
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.post_warmup_state = state
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MHBT: ")
        mcmc.run(random.key(0), *args, **options)
    return mcmc


def draws_of(mcmc, name="mu"):
    return np.asarray(mcmc.get_samples(group_by_chain=True)[name], np.float64)


# --- likelihoods without a value on 30% of the space


def in_pit(mu):
    """In 30% of every interval of length 1.25; the reference is outside."""
    return mu * 0.8 % 1 > 0.7


def pitted(y, bad, m):
    mu = numpyro.sample("mu", dist.Normal(0.5, 2))
    with numpyro.plate("N", len(y), subsample_size=m) as rows:
        numpyro.sample("y", dist.Logistic(mu, 0.7), obs=y[rows])
        numpyro.factor("pit", jnp.where(in_pit(mu), bad, 0.0))


def trapped(y, m):
    """Finite everywhere, but with no gradient in a pit: the branch not taken is NaN."""
    mu = numpyro.sample("mu", dist.Normal(0.5, 2))
    with numpyro.plate("N", len(y), subsample_size=m) as rows:
        numpyro.sample("y", dist.Logistic(mu, 0.7), obs=y[rows])
        inside = in_pit(mu)
        root = jnp.sqrt(jnp.where(inside, -1.0, 1.0) * (1 + mu**2))
        numpyro.factor("trap", 0.0 * jnp.where(inside, 0.0, root))


class Outside:
    """Moments of what is left of an exact marginal outside of the pits."""

    def __init__(self, exact, keep=lambda mu: ~in_pit(mu)):
        p = exact.p * keep(exact.grid)
        p /= p.sum()
        self.mean = p @ exact.grid
        self.variance = p @ (exact.grid - self.mean) ** 2
        # Chains start there, so that little warm-up will do.
        quantiles = np.interp(
            (np.arange(CHAINS) + 0.5) / CHAINS, np.cumsum(p), exact.grid
        )
        self.start = np.where(in_pit(quantiles), quantiles - 0.4, quantiles)


def pitfall(model, order, proposal, **options):
    """A chain of each order at which its target is known, and that target."""
    m, c_n = (2, 3.0) if order in (None, 0) else (5, 1.0)
    kernel = MHBT(
        partial(model, m=m),
        proposal,
        c_n=c_n,
        control_variate=control(order, ref_params=REFERENCE),
        **(options or FIXED),
    )
    reference = () if order is None else (0.3, order)
    return kernel, Exact(c_n, *reference, correct=True, m=m)


PROPOSALS = {"RSGLD": RSGLD(1.0, 1.5), "SGLD": SGLD(1.0), "walk": RandomWalk(1.5)}
QUICK = ["0-RSGLD-nan", "None-walk-inf", "2-RSGLD--inf"]


def _pits():
    for order, name in product(ORDERS, ("RSGLD", "walk")):
        for bad in (np.nan, np.inf, -np.inf):
            case = f"{order}-{name}-{bad}"
            marks = [] if case in QUICK else slow
            yield pytest.param(order, name, bad, marks=marks, id=case)


@pytest.mark.parametrize("order, name, bad", list(_pits()))
def test_no_value_on_a_third_of_the_space(order, name, bad):
    kernel, exact = pitfall(pitted, order, PROPOSALS[name])
    left = Outside(exact)
    assert exact.p @ in_pit(exact.grid) > 0.2
    mcmc = run(kernel, Y, bad, init_params={"mu": jnp.asarray(left.start)})
    mu = draws_of(mcmc)
    assert not in_pit(mu.astype(np.float32)).any()
    # A pit holds three tenths of what is proposed.
    assert 0.02 < np.mean(mcmc.get_extra_fields()["diverging"]) < 0.5
    assert_moments(mu, left.mean, left.variance)


@pytest.mark.parametrize(
    "name", ["RSGLD", *(pytest.param(x, marks=slow) for x in ("SGLD", "walk"))]
)
def test_no_gradient_on_a_third_of_the_space(name):
    """A gradient proposal would never leave; a walk does not need the gradient."""
    kernel, exact = pitfall(trapped, 0, PROPOSALS[name])
    walks = name == "walk"
    left = Outside(exact, np.isfinite if walks else lambda mu: ~in_pit(mu))
    mcmc = run(kernel, Y, init_params={"mu": jnp.asarray(left.start)})
    mu = draws_of(mcmc)
    assert np.any(mcmc.get_extra_fields()["diverging"]) != walks
    assert in_pit(mu.astype(np.float32)).any() == walks
    assert_moments(mu, left.mean, left.variance)


@pytest.mark.parametrize("order, name", [(0, "walk"), (2, "RSGLD")])
def test_steps_adapt_to_a_space_with_pits(order, name):
    kernel, exact = pitfall(pitted, order, PROPOSALS[name], adapt_step_size=True)
    left = Outside(exact)
    start = {"mu": jnp.asarray(left.start)}
    mcmc = run(kernel, Y, np.nan, num_warmup=1000, num_samples=1000, init_params=start)
    assert_moments(draws_of(mcmc), left.mean, left.variance)


def test_steps_do_not_shrink_to_nothing_at_the_edge_of_a_pit():
    """In loud noise a chain lingers there, and half of its moves end in the pit."""
    kernel, exact = pitfall(pitted, 0, None, adapt_step_size=True)
    start = {"mu": jnp.asarray(Outside(exact).start)}
    mcmc = run(kernel, Y, np.nan, num_warmup=1000, init_params=start)
    state = mcmc.last_state
    widths = np.ravel(state.adapt_state.mass_matrix_sqrt_inv)
    lengths = widths * np.sqrt(2 * np.asarray(state.step_size) / 3.0)
    assert lengths.shape == (CHAINS,)
    assert lengths.min() > 0.05  # a pit is 0.375 wide


def test_steps_of_any_length_keep_the_target_between_pits():
    """
    Those that chains found in loud noise, each its own, from exact draws of (θ, I).

    Draws right after warm-up are too wide: chains in the tails find shorter steps than
    others, and come back the later for it. That is no matter of the target.
    """
    kernel, exact = pitfall(pitted, 0, None, adapt_step_size=True)
    start = {"mu": jnp.asarray(Outside(exact).start)}
    found = run(kernel, Y, np.nan, num_warmup=1000, num_samples=1, init_params=start)
    assert np.ptp(found.last_state.step_size) > 0
    mcmc = run(
        kernel,
        Y,
        np.nan,
        num_samples=1000,
        state=from_exact_draws(kernel, exact, found.last_state),
    )
    left = Outside(exact)
    assert_moments(draws_of(mcmc), left.mean, left.variance)


def from_exact_draws(kernel, exact, state, seed=0):
    """The state of chains with another pair (θ, I) each, drawn from the target."""
    rng = np.random.default_rng(seed)
    p = exact.p * ~in_pit(exact.grid)
    places = rng.choice(len(p), len(state.step_size), p=p / p.sum())
    # Gumbel's way to draw from weights that are known by their logarithms.
    values = exact.values[:, places]
    which = np.argmax(values + rng.gumbel(size=values.shape), axis=0)
    state = state._replace(
        z={"mu": jnp.asarray(exact.grid[places], jnp.float32)},
        batch={"N": jnp.asarray(exact.batches[which], jnp.int32)},
    )
    return kernel.refresh(state, (Y, np.nan), {})


@pytest.mark.parametrize("c_n", [5.0, 0.05])
def test_steps_between_walls(c_n):
    """
    A move beyond them counts half: a + (1 - a) 0.45 / 2 = 0.45 at a = 0.29.

    With the smaller c_n steps are far too long at first, and all moves diverge.
    """

    def walls(y):
        mu = numpyro.sample("mu", dist.Normal(0, 100).expand([30]).to_event(1))
        inside = jnp.all(jnp.abs(mu) < 2.01)
        numpyro.factor("walls", jnp.where(inside, 0.0, -jnp.inf))
        with numpyro.plate("N", len(y), subsample_size=10) as rows:
            numpyro.sample("y", dist.Normal(mu[0], 100), obs=y[rows])

    kernel = MHBT(walls, RSGLD(1.0), c_n=c_n, adapt_mass_matrix=False)
    mcmc = run(
        kernel, jnp.zeros(20), num_chains=64, init_params={"mu": jnp.zeros((64, 30))}
    )
    assert 0.2 < np.mean(mcmc.last_state.mean_accept_prob) < 0.36


@pytest.mark.parametrize("steps_per_draw", [1, 4])
def test_diverging_proposals_are_said(steps_per_draw):
    """By their share, while the run goes on and after it."""
    kernel, _ = pitfall(
        pitted, 0, RandomWalk(2.0), steps_per_draw=steps_per_draw, **FIXED
    )
    mcmc = MCMC(
        kernel,
        num_warmup=200,
        num_samples=1000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
    )
    start = {"mu": jnp.full(4, 0.3)}
    words = r"(2\d|3\d)% of all proposals had no finite.*`adapt_step_size=False`"
    with pytest.warns(UserWarning, match=words) as said:
        mcmc.run(random.key(0), Y, np.nan, init_params=start)
    assert len(said) == 2  # at the end of warm-up, and of this run
    with pytest.warns(UserWarning, match=words):
        report = batch_report(mcmc)
    assert not report.trusted
    if steps_per_draw == 1:
        share = float(np.mean(mcmc.get_extra_fields()["diverging"]))
        found = float(np.mean(mcmc.last_state.mean_diverging))
        assert found == pytest.approx(share, rel=1e-3)


def test_start_without_gradient():
    kernel, _ = pitfall(trapped, 0, PROPOSALS["RSGLD"])
    start = {"mu": jnp.full(CHAINS, 1.0)}
    with pytest.raises(ValueError, match=r"gradient.*'mu'.*RandomWalk"):
        run(kernel, Y, init_params=start)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("order", [0, 2])
@slow
def test_reference_and_temperature_are_found_between_pits(order, bad):
    kernel = MHBT(partial(pitted, m=5), control_variate=Taylor(order))
    mcmc = run(kernel, Y, bad)
    assert not in_pit(np.asarray(mcmc.get_samples()["mu"])).any()
    assert not in_pit(np.asarray(mcmc.last_state.shared.reference.z)).any()


# --- data


def normal_mean(y, m, scale=1.0):
    mu = numpyro.sample("mu", dist.Normal(0, scale))
    with numpyro.plate("N", len(y), subsample_size=m) as rows:
        numpyro.sample("y", dist.Normal(mu, scale), obs=y[rows])


def assert_normal_mean(mcmc, y, scale=1.0, slack=0.0):
    """Draws are those of the conjugate posterior at the run's temperature."""
    precision = 1 + len(y)
    t = float(mcmc.last_state.temperature[0])
    mean = np.sum(np.asarray(y, np.float64)) / scale / precision
    assert_moments(draws_of(mcmc) / scale, mean, t / precision, slack=slack)


def _is_near_normal_mean(mcmc, y, scale):
    """Whether each chain would do, which is no question of Monte Carlo error."""
    precision = 1 + len(y)
    deviation = np.sqrt(float(mcmc.last_state.temperature[0]) / precision)
    mean = np.sum(np.asarray(y, np.float64)) / scale / precision
    off = (draws_of(mcmc) / scale - mean) / deviation
    return abs(off.mean()) < 0.2 and 0.7 < off.var(axis=1).mean() < 1.4


@pytest.mark.parametrize("order", some_slow(0))
def test_all_rows_equal(order):
    """There is no noise, whatever the batch: the posterior itself."""
    y = jnp.full(30, 0.7)
    mcmc = run(
        MHBT(partial(normal_mean, m=3), control_variate=control(order)),
        y,
        extra_fields=("noise_variance",),
    )
    assert np.all(mcmc.last_state.temperature == 1)
    # That of a sample variance of three equal numbers, by rounding.
    assert np.all(mcmc.get_extra_fields()["noise_variance"] < 1e-6)
    assert_normal_mean(mcmc, y)


@pytest.mark.parametrize("order", some_slow(None))
@pytest.mark.parametrize("proposal", [None, pytest.param(RandomWalk(), marks=slow)])
def test_a_single_row(order, proposal):
    y = jnp.array([1.3])
    kernel = MHBT(partial(normal_mean, m=1), proposal, control_variate=control(order))
    mcmc = run(kernel, y)
    assert_normal_mean(mcmc, y)


@pytest.mark.parametrize("order", some_slow(0))
def test_all_rows_but_one(order):
    """T and the reference as the kernel finds them: the target follows from these."""
    kernel = MHBT(partial(logistic, m=len(Y) - 1), control_variate=control(order))
    mcmc = run(kernel, Y)
    state = mcmc.last_state
    reference = ()
    if order is not None:
        reference = float(state.shared.reference.z[0, 0]), order
    exact = Exact(
        len(Y) / float(state.temperature[0]), *reference, correct=True, m=len(Y) - 1
    )
    assert_moments(draws_of(mcmc), exact.mean, exact.variance)


def regression(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("N", len(y), subsample_size=50) as rows:
        numpyro.sample("y", dist.Normal(x[rows] @ w, 1), obs=y[rows])


@pytest.mark.parametrize("order", some_slow(2))
def test_constant_columns_and_duplicate_rows(order):
    """One column of zeros, one of ones, two alike; each row three times."""
    rng = np.random.default_rng(0)
    column, noise = rng.normal(size=(2, 100))
    x = np.stack([0 * column, 0 * column + 1, column, column], axis=1)
    y = 0.5 + column + noise
    x, y = np.repeat(x, 3, axis=0), np.repeat(y, 3)
    mcmc = run(MHBT(regression, control_variate=control(order)), x, y, num_chains=64)
    t = float(mcmc.last_state.temperature[0])
    covariance = np.linalg.inv(np.eye(4) + x.T @ x)
    w = draws_of(mcmc, "w")
    # Orders below 2 leave a bias in the spread of some percent at this noise.
    slack = 0.0 if order == 2 else 0.15
    variance = t * np.diag(covariance)
    assert_moments(w, w.mean((0, 1)), variance, slack=slack)
    assert np.all(np.abs(w.mean((0, 1)) - covariance @ x.T @ y) < 0.1 * variance**0.5)


# What becomes of data in units so small or large that the model is not of order one.
REFUSED, SAID, RIGHT = "refused", "said", "right"
# Said, though the draws would do. What is listed as SAID must not become this.
DOUBTED = "doubted"
# Beyond what is here R-hat is near its bound, and a draw more or less decides.
CLASSES = {
    (1e-20, "RSGLD"): dict.fromkeys(ORDERS, REFUSED),
    (1e-20, "walk"): dict.fromkeys(ORDERS, REFUSED),
    (1e-10, "RSGLD"): {None: SAID, 0: SAID, 1: SAID, 2: RIGHT},
    (1e-10, "walk"): {None: SAID, 0: SAID, 1: SAID, 2: RIGHT},
    (1e-5, "RSGLD"): {1: RIGHT, 2: RIGHT},
    (1e-5, "walk"): {1: RIGHT, 2: RIGHT},
    (1e5, "RSGLD"): {1: RIGHT, 2: RIGHT},
    (1e5, "walk"): {1: RIGHT, 2: RIGHT},
    (1e10, "RSGLD"): {None: SAID, 0: SAID, 1: RIGHT, 2: RIGHT},
    (1e10, "walk"): {1: RIGHT, 2: RIGHT},
    (1e20, "RSGLD"): dict.fromkeys(ORDERS, SAID),
    (1e20, "walk"): dict.fromkeys(ORDERS, SAID),
}
# Each of these says that draws are not to be trusted.
STRONG = "accepted next to nothing|draws are biased|not those of the post|not mixed"


def _scales():
    for scale, order, name in product(
        (1e-20, 1e-10, 1e-5, 1e5, 1e10, 1e20), ORDERS, ("RSGLD", "walk")
    ):
        always = (scale, order, name) == (1e5, 2, "RSGLD")
        yield pytest.param(scale, order, name, marks=[] if always else slow)


@pytest.mark.parametrize("scale, order, name", list(_scales()))
def test_extreme_scales_are_right_or_refused_or_said(scale, order, name):
    y = scale * np.random.default_rng(0).normal(1.0, 1.0, 60).astype(np.float32)
    kernel = MHBT(
        partial(normal_mean, m=20, scale=scale),
        RandomWalk() if name == "walk" else None,
        control_variate=control(order),
        steps_per_draw=10,
    )
    found = _what_becomes_of(kernel, y, scale, slack=0.0 if order == 2 else 0.2)
    assert found == CLASSES[scale, name].get(order, found)
    assert (found == REFUSED) == (scale == 1e-20)


def _what_becomes_of(kernel, y, scale, slack):
    mcmc = MCMC(
        kernel,
        num_warmup=500,
        num_samples=500,
        num_chains=16,
        chain_method="vectorized",
        progress_bar=False,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            mcmc.run(random.key(0), y)
        except ValueError as error:
            assert re.search(r"log-density of site\(s\) 'mu', 'y'", str(error))
            return REFUSED
        report = batch_report(mcmc)
    said = [str(warning.message) for warning in caught]
    if any(re.search(STRONG, text) for text in said):
        assert not report.trusted
        return DOUBTED if _is_near_normal_mean(mcmc, y, scale) else SAID
    assert_normal_mean(mcmc, y, scale, slack)
    return RIGHT


@pytest.mark.filterwarnings("ignore:MHBT")
def test_more_draws_than_a_counter_holds():
    """Warm-up does not begin again."""
    kernel, _ = pitfall(pitted, 0, None, adapt_step_size=True)
    data = Y, 0.0
    state = kernel.init(random.key(1), 10, {"mu": jnp.array(0.3)}, data, {})
    state = state._replace(i=jnp.int32(2**31 - 2))
    step_size = state.step_size
    for _ in range(3):
        state = kernel.sample(state, data, {})
    assert state.i == 2**31 - 1
    assert state.step_size == step_size


@pytest.mark.filterwarnings("ignore:MHBT")
@pytest.mark.parametrize("length, lost", [(1e-3, True), (100.0, False)])
def test_move_lost_to_rounding_is_none(length, lost):
    """Near 10^8 numbers of 32 bits are 8 apart."""

    def far_out(y):
        mu = numpyro.sample("mu", dist.Normal(1e8, 1e4))
        with numpyro.plate("N", len(y), subsample_size=5) as rows:
            numpyro.sample("y", dist.Normal(mu, 1e4), obs=y[rows])

    data = (1e8 + 1e4 * random.normal(random.key(0), (20,)),)
    kernel = MHBT(far_out, RandomWalk(length), temperature=1.0, **FIXED)
    start = {"mu": jnp.array(1e8)}
    state = kernel.init(random.key(1), 0, start, data, {})
    for _ in range(20):
        state = kernel.sample(state, data, {})
    assert (float(state.mean_accept_prob) == 0) == lost
