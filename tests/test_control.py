"""Control variates, bias correction, blocks and the choice of T: what they promise."""

import math
from unittest.mock import Mock

from chains import run_chains
import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest
from scipy import stats

from numpyro_mhbt import MHBT, SGLD, RandomWalk, Taylor, batch_report, prepare
from numpyro_mhbt.advice import reached
from numpyro_mhbt.control import Reference, remainder
from numpyro_mhbt.passes import cumulants
from numpyro_mhbt.plates import Plate, next_batch
from numpyro_mhbt.prepare import expand
from numpyro_mhbt.setup import read
from numpyro_mhbt.temperature import coldest, temperature_grid

N, M, D = 10_000, 1000, 10


def gaussian(y):
    mu = numpyro.sample("mu", dist.Normal(0, 100).expand([D]).to_event(1))
    with numpyro.plate("N", len(y), subsample_size=M) as rows:
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[rows])


def logistic(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("N", len(x), subsample_size=M) as rows:
        numpyro.sample("y", dist.Bernoulli(logits=x[rows] @ w), obs=y[rows])


def logistic_data(n, d, key=0):
    keys = random.split(random.key(key), 3)
    x = random.normal(keys[0], (n, d))
    w = 0.5 * random.normal(keys[1], (d,))
    return x, random.bernoulli(keys[2], jax.nn.sigmoid(x @ w)).astype(jnp.float32)


def laplace(x, y):
    """Mode and standard deviations, by Newton's method in double precision."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    w = np.zeros(x.shape[1])
    for _ in range(20):
        p = 1 / (1 + np.exp(-x @ w))
        hessian = (x * (p * (1 - p))[:, None]).T @ x + np.eye(len(w))
        w = w + np.linalg.solve(hessian, x.T @ (y - p) - w)
    return w, np.sqrt(np.diag(np.linalg.inv(hessian)))


def make_mcmc(kernel, **kwargs):
    settings = {"num_warmup": 500, "num_samples": 500, "num_chains": 4}
    settings |= {"chain_method": "vectorized", "progress_bar": False}
    return MCMC(kernel, **(settings | kwargs))


@pytest.mark.parametrize("order", [1, 2])
def test_remainder_and_its_gradient(order):
    """Beside the expansion written out with the derivatives of each row."""
    a, here, there = (
        random.normal(random.key(k), s) for k, s in enumerate([(6, 3), 3, 3])
    )

    def rows_at(z):
        return jnp.exp(jnp.sin(a @ z))

    slopes, bends = jax.jacobian(rows_at)(here), jax.hessian(rows_at)(here)
    reference = Reference(here, slopes.sum(0), bends.sum(0) if order == 2 else None)

    def ours(z):
        rows, known = remainder(rows_at(z), rows_at, reference, z)
        return jnp.sum(rows**2) + known

    def plain(z):
        step = z - here
        missed, known = slopes @ step, slopes.sum(0) @ step
        if order == 2:
            missed += bends @ step @ step / 2
            known += bends.sum(0) @ step @ step / 2
        return jnp.sum((rows_at(z) - rows_at(here) - missed) ** 2) + known

    for found, expected in zip(
        jax.value_and_grad(ours)(there), jax.value_and_grad(plain)(there), strict=True
    ):
        assert np.allclose(found, expected, rtol=1e-4)


slow = pytest.mark.slow
SPREAD = [
    pytest.param(20, True, marks=slow),
    (100, True),
    pytest.param(300, True, marks=slow),
    pytest.param(20, False, marks=slow),
    pytest.param(100, False, marks=slow),
    pytest.param(300, False, marks=slow),
]


@pytest.mark.long_chains
@pytest.mark.parametrize("c_n, correct", SPREAD)
def test_spread_of_a_gaussian_mean(c_n, correct):
    """Within 3% of the tempered posterior, or of the inflation that theory predicts."""
    y = random.normal(random.key(0), (N, D))
    kernel = MHBT(gaussian, SGLD(), c_n=c_n, bias_correction=correct)
    # In loud noise a chain lingers on batches that flatter it.
    draws = 2500 if c_n < 300 else 10_000 if correct else 20_000
    mu = run_chains(kernel, y, num_chains=64, burn=1000, draws=draws)["mu"]
    # The finite-population factor 1 - m/n belongs to the noise and so to the bias.
    predicted = 1 if correct else 1 / (1 - c_n / M * (1 - M / N))
    squares = (mu - np.asarray(y).mean(0)).reshape(64, -1) ** 2 * c_n
    error = squares.mean(1).std() / 8 / predicted
    assert 3 * error < 0.03  # so that Monte Carlo error does not decide
    assert squares.mean() == pytest.approx(predicted, rel=0.03)


@pytest.mark.long_chains
@pytest.mark.parametrize("order", [pytest.param(1, marks=slow), 2])
def test_posterior_itself_from_batches(order):
    """T = 1 is chosen, and means and spread are those of the posterior."""
    x, y = logistic_data(50_000, 5)
    mode, sd = laplace(x, y)
    mcmc = make_mcmc(
        MHBT(logistic, SGLD(), control_variate=Taylor(order)),
        num_chains=32,
        num_warmup=1000,
        num_samples=1500,
    )
    mcmc.run(random.key(1), x, y)
    report = batch_report(mcmc)
    assert report.temperature == 1
    assert report.trusted
    w = (np.asarray(mcmc.get_samples(group_by_chain=True)["w"]) - mode) / sd
    # The posterior is not quite Gaussian: its mean is within a few hundredths of a
    # standard deviation of the mode.
    assert np.all(np.abs(w.mean((0, 1))) < 0.1)
    assert np.all(np.abs(w.std((0, 1)) - 1) < 0.03)


def incomes(x, y):
    """In dollars: the posterior is more than a hundred of them wide."""
    w = numpyro.sample("w", dist.Normal(0, 1e5).expand([2]).to_event(1))
    with numpyro.plate("N", len(y), subsample_size=500) as rows:
        numpyro.sample("y", dist.Normal(x[rows] @ w, INCOME_SD), obs=y[rows])


INCOME_SD = 40_000.0


def score(draws, exact):
    """Distance of a mean from the exact one in standard errors, and that error."""
    error = draws.std() / effective_sample_size(draws) ** 0.5
    return (draws.mean() - exact) / error, error


# Order 1 knows no Newton steps, which would take a reference so far from zero.
NEARBY = {"w": jnp.array([50_000.0, 2000.0])}


@pytest.mark.parametrize("control", [Taylor(1, ref_params=NEARBY), Taylor(2)])
def test_wide_posterior_in_small_units(control):
    """Mean and spread of a conjugate model whose standard deviations are 126 and 40."""
    keys = random.split(random.key(0), 2)
    n = 100_000
    x = jnp.stack([jnp.ones(n), np.sqrt(10) * random.normal(keys[0], (n,))], axis=1)
    y = x @ jnp.array([50_000.0, 2000.0]) + INCOME_SD * random.normal(keys[1], (n,))
    exact_x, exact_y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    precision = exact_x.T @ exact_x / INCOME_SD**2 + np.eye(2) / 1e10
    mean = np.linalg.solve(precision, exact_x.T @ exact_y / INCOME_SD**2)
    sd = np.sqrt(np.diag(np.linalg.inv(precision)))
    assert sd[0] == pytest.approx(126, abs=1)

    kernel = MHBT(incomes, SGLD(), control_variate=control)
    mcmc = make_mcmc(kernel, num_samples=2000)
    mcmc.run(random.key(1), x, y)
    assert mcmc.last_state.temperature[0] == 1
    w = np.asarray(mcmc.get_samples(group_by_chain=True)["w"], np.float64)
    unit = (w - mean) / sd
    for coordinate in np.moveaxis(unit, -1, 0):
        for draws, expected in ((coordinate, 0), (coordinate**2, 1)):
            distance, error = score(draws, expected)
            assert abs(distance) < 4
            assert error < 0.05  # a chain of short steps would not know


@pytest.mark.filterwarnings("ignore:Some donated buffers", "ignore:MHBT. T = ")
@pytest.mark.parametrize("method", ["parallel", pytest.param("vectorized", marks=slow)])
def test_one_temperature_for_all_chains(method):
    x, y = logistic_data(20_000, 4)
    mcmc = make_mcmc(
        MHBT(logistic), num_chains=2, chain_method=method, num_warmup=20, num_samples=10
    )
    mcmc.run(random.key(0), x, y, extra_fields=("temperature",))
    temperature = np.asarray(mcmc.get_extra_fields()["temperature"])
    assert np.ptp(temperature) == 0
    # v = c d / m in a regular model
    assert 20_000 / temperature[0] == pytest.approx(M / 4, rel=0.5)


def test_noise_is_near_its_target():
    y = random.normal(random.key(0), (N, D))
    mcmc = make_mcmc(MHBT(gaussian, SGLD(), target_noise=0.3), num_warmup=1000)
    mcmc.run(random.key(0), y)
    noise = np.median(mcmc.last_state.mean_noise_variance)
    assert noise == pytest.approx(0.3, rel=0.35)


def test_coldest():
    grid = temperature_grid(1e5)
    assert coldest(grid, 100 / grid, target=1.0) == pytest.approx(100)
    assert coldest(grid, 1e4 / grid**2, target=1.0) == pytest.approx(100)
    assert coldest(grid, 0.5 * grid**0, target=1.0) == 1
    assert coldest(grid, 2.0 * grid, target=1.0) == 1  # loud whatever T
    loud_at_first = coldest(grid, np.where(grid < 50, np.inf, 0.1), 1.0)
    assert loud_at_first >= 50


def hierarchical(group, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    effects = tau * numpyro.sample("effects", dist.Normal(0, 1).expand([8]).to_event(1))
    with numpyro.plate("N", len(y), subsample_size=300) as idx:
        numpyro.sample("y", dist.Normal(effects[group[idx]], 1), obs=y[idx])


@pytest.mark.filterwarnings("ignore:MHBT. Chains have not mixed")
def test_pilot_run_where_no_gaussian_fits():
    """The posterior is a bent ridge: around it a hot Gaussian is far too loud."""
    key_group, key_effects, key_y = random.split(random.key(0), 3)
    group = random.randint(key_group, (20_000,), 0, 8)
    y = random.normal(key_effects, (8,))[group] / 2 + random.normal(key_y, (20_000,))
    mcmc = make_mcmc(MHBT(hierarchical), num_warmup=1000, num_samples=2000)
    mcmc.run(random.key(0), group, y)
    # From 0.9 to 1.9 over seeds: chains are slow along the ridge.
    assert abs(math.log(batch_report(mcmc).noise_variance)) < math.log(2.5)


def test_pilot_run_where_every_temperature_is_too_loud():
    """A network: around its mode there is noise at any T, but chains leave it."""
    key_x, key_y = random.split(random.key(0))
    x = random.normal(key_x, (20_000, 4))
    y = jnp.sin(x[:, 0]) + x[:, 1] * x[:, 2]
    y += 0.3 * random.normal(key_y, y.shape)

    def network(x, y):
        units = dist.Normal().expand([5, 8]).to_event(2)
        inner = numpyro.sample("inner", units)
        outer = numpyro.sample("outer", dist.Normal().expand([8]).to_event(1))
        with numpyro.plate("N", len(x), subsample_size=500):
            xb, yb = numpyro.subsample(x, 1), numpyro.subsample(y, 0)
            mean = jnp.tanh(xb @ inner[:4] + inner[4]) @ outer
            numpyro.sample("y", dist.Normal(mean, 0.3), obs=yb)

    kernel = MHBT(network, temper_prior=False)
    data, _ = read(network, (x, y), {})
    setup = prepare.prepare(kernel._settings, kernel._programs, data)
    assert setup.temperature < 0.8 * len(x)


def test_cumulants_of_independent_rows():
    """Against the distribution of a sum of two rows over all pairs of five."""
    n, m, temperature = 5, 2, 3.0
    rows = np.array([0.3, -1.0, 2.0, 0.1, 0.4])
    estimate = n / m * (rows[:, None] + rows).ravel() / temperature
    centred = estimate - estimate.mean()
    second, fourth = np.mean(centred**2), np.mean(centred**4)
    exact = np.array([second, np.mean(centred**3), fourth - 3 * second**2])
    sums = np.stack([np.sum(rows**p) for p in (1, 2, 3, 4)])
    found = cumulants(sums, Plate("N", n, m), temperature)
    np.testing.assert_allclose(found, exact * (1 - m / n), rtol=1e-10)


def test_blocks_stay_distinct_and_uniform():
    plates = (Plate("N", 9, 4),)
    key = random.key(0)

    def chain(key):
        def move(batch, key):
            batch = next_batch(key, batch, plates, 3)
            return batch, batch["N"]

        return jax.lax.scan(move, {"N": jnp.arange(4)}, random.split(key, 200))[1]

    rows = np.sort(jax.vmap(chain)(random.split(key, 3000)), axis=-1)
    assert np.all(np.diff(rows) > 0)
    assert rows.min() == 0
    assert rows.max() == 8
    # Two of four rows change at a time.
    kept = [len(set(a) & set(b)) for a, b in zip(rows[0], rows[0, 1:], strict=False)]
    assert min(kept) == 2
    # After 200 moves all 126 batches are as likely.
    codes = (2 ** rows[:, -1]).sum(-1)
    counts = np.unique(codes, return_counts=True)[1]
    assert len(counts) == 126
    assert stats.chisquare(counts).pvalue > 1e-4


def test_blocks_raise_acceptance():
    y = random.normal(random.key(0), (N, D))
    rates = []
    for num_blocks in (1, 10):
        kernel = MHBT(
            gaussian,
            RandomWalk(1e-3),
            c_n=300,
            num_blocks=num_blocks,
            adapt_step_size=False,
        )
        mcmc = make_mcmc(kernel)
        # One standard deviation off in each coordinate: the walk hardly leaves.
        start = jnp.broadcast_to(y.mean(0) + 300**-0.5, (4, D))
        mcmc.run(random.key(0), y, init_params={"mu": start})
        rates.append(np.mean(mcmc.last_state.mean_accept_prob))
    # v is about 3: at most 0.22 of all moves, and with v / 10 0.70
    assert rates[0] < 0.3
    assert rates[1] > 0.6


def test_schedules_of_temperature_and_step_size():
    y = random.normal(random.key(0), (N, D))

    def cooling(i):
        return jnp.maximum(500.0 * 0.5 ** (i / 20), 100.0)

    def shrinking(i):
        return 2 / (1 + i / 20)

    kernel = MHBT(gaussian, SGLD(shrinking), temperature=cooling)
    mcmc = make_mcmc(kernel, num_warmup=0, num_samples=1000)
    fields = ("temperature", "step_size")
    mcmc.run(random.key(0), y, extra_fields=fields)
    extra = mcmc.get_extra_fields(group_by_chain=True)
    i = np.arange(1000)
    np.testing.assert_allclose(extra["temperature"][0], cooling(i), rtol=1e-5)
    step_size = np.minimum(shrinking(i), 1)  # longer ones have no meaning
    np.testing.assert_allclose(extra["step_size"][0], step_size, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:MHBT. . of . chain")
def test_value_is_that_of_the_present_temperature():
    """A chain that never moves shows its value at one temperature and another."""
    y = random.normal(random.key(0), (N, D))
    kernel = MHBT(
        gaussian,
        RandomWalk(1e6),
        temperature=lambda i: jnp.where(i % 2 == 0, 100.0, 1000.0),
        control_variate=None,
        bias_correction=False,
    )
    mcmc = make_mcmc(kernel, num_warmup=0, num_samples=20)
    mcmc.run(random.key(0), y, extra_fields=("log_density", "temperature", "accepted"))
    fields = mcmc.get_extra_fields(group_by_chain=True)
    assert np.sum(fields["accepted"]) == 0
    untempered = fields["log_density"] * fields["temperature"]
    np.testing.assert_allclose(untempered, untempered[:, :1].repeat(20, 1), rtol=1e-4)


def test_expansion_that_misses_too_much_is_told():
    """Columns that three rows of 50 000 have: batches mostly do not see them."""

    def model(x, y):
        w = numpyro.sample("w", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
        with numpyro.plate("N", len(x), subsample_size=100) as rows:
            numpyro.sample("y", dist.Bernoulli(logits=x[rows] @ w), obs=y[rows])

    x, y = logistic_data(50_000, 3)
    rare = np.zeros((50_000, 8), np.float32)
    for column in range(8):
        rare[column * 7 + np.arange(3), column] = 1
    mcmc = make_mcmc(MHBT(model, SGLD(), control_variate=Taylor(2, exact_rows=0)))
    with pytest.warns(UserWarning, match=r"Taylor\(order=2\) misses is too large"):
        mcmc.run(random.key(0), jnp.hstack([x, rare]), y)
    with pytest.warns(UserWarning, match="few rows inform"):
        assert not batch_report(mcmc).trusted


def test_resume_with_other_data_is_told():
    x, y = logistic_data(5000, 3)
    mcmc = make_mcmc(
        MHBT(logistic, SGLD(), control_variate=Taylor(2)), jit_model_args=True
    )
    mcmc.warmup(random.key(0), x, y)
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.warns(UserWarning, match="other data"):
        mcmc.run(random.key(1), x, 1 - y)
        jax.effects_barrier()


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize("method", ["parallel", pytest.param(jax.vmap, marks=slow)])
def test_expansion_is_the_same_under_every_chain_method(method):
    x, y = logistic_data(5000, 3)
    kernel = MHBT(logistic, SGLD(), control_variate=Taylor(2))
    runs = []
    for chain_method in ("vectorized", method):
        mcmc = make_mcmc(
            kernel,
            num_chains=2,
            num_warmup=5,
            num_samples=5,
            chain_method=chain_method,
            jit_model_args=True,
        )
        mcmc.run(random.key(0), x, y)
        runs.append(mcmc)
    one, other = (mcmc.last_state.shared.reference for mcmc in runs)
    np.testing.assert_array_equal(one.z[0], one.z[1])
    jax.tree.map(np.testing.assert_array_equal, one, other)
    one, other = (mcmc.get_samples(group_by_chain=True)["w"] for mcmc in runs)
    np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-4)


def test_new_data_have_their_own_expansion():
    x, y = logistic_data(20_000, 3)
    kernel = MHBT(logistic, SGLD(), control_variate=Taylor(2))
    mcmc = make_mcmc(kernel, num_samples=2000, jit_model_args=True)
    for data in ((x, y), (x, 1 - y)):
        mcmc.run(random.key(0), *data)
        mode, sd = laplace(*data)
        w = np.asarray(mcmc.get_samples()["w"])
        assert np.all(np.abs(w.mean(0) - mode) < 0.2 * sd)


def test_reference_without_derivatives():
    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        with numpyro.plate("N", len(y), subsample_size=2) as rows:
            numpyro.factor("root", -jnp.sqrt(jnp.abs(mu)) * y[rows] ** 2)

    control = Taylor(1, ref_params={"mu": jnp.zeros(())})
    kernel = MHBT(model, control_variate=control, temperature=1.0)
    with pytest.raises(ValueError, match="no finite derivatives at the reference"):
        kernel.init(random.key(0), 0, None, (jnp.ones(5),), {})


def two_wells(y):
    """Modes at -1 and 1, and no concave log-density between them."""
    mu = numpyro.sample("mu", dist.Normal(0, 10))
    with numpyro.plate("N", len(y), subsample_size=5) as rows:
        numpyro.factor("wells", -((mu**2 - 1) ** 2) * y[rows] ** 2)


WELLS = (1 + 0.1 * random.normal(random.key(0), (50,)),)


def test_reference_climbs_out_of_where_nothing_is_concave():
    kernel = MHBT(two_wells, control_variate=Taylor(2), temperature=1.0)
    data, _ = read(two_wells, WELLS, {})
    at = jnp.array([0.05])
    z = {"mu": at[0]}
    reference, _ = expand(
        kernel._settings, kernel._programs, data, z, at, Taylor(2), 1.0
    )
    assert float(reference.z[0]) == pytest.approx(1, abs=0.05)
    assert float(reference.hessian[0, 0]) < 0


def test_large_models_do_not_climb_for_long(monkeypatch):
    monkeypatch.setattr(prepare, "MAX_DIM", 0)
    passes = Mock(wraps=prepare.sum_over_rows)
    monkeypatch.setattr(prepare, "sum_over_rows", passes)
    kernel = MHBT(two_wells, control_variate=Taylor(2), temperature=1.0)
    data, _ = read(two_wells, WELLS, {})
    at = jnp.array([0.001])  # many steps from anything concave
    expand(kernel._settings, kernel._programs, data, {"mu": at[0]}, at, Taylor(2), 1.0)
    assert passes.call_count == 2


def test_reference_that_is_no_mode_is_told():
    control = Taylor(2, ref_params={"mu": jnp.array(0.1)})
    kernel = MHBT(two_wells, control_variate=control, temperature=1.0)
    with pytest.warns(UserWarning, match="is not near a mode"):
        kernel.init(random.key(0), 0, None, WELLS, {})


@pytest.mark.long_chains
class TestBatchReport:
    """A verdict in plain words, and the same text as a warning if it is bad."""

    y = random.normal(random.key(0), (N, D))

    def run(self, kernel, **kwargs):
        mcmc = make_mcmc(kernel, **({"num_samples": 8000} | kwargs))
        mcmc.run(random.key(0), self.y)
        return mcmc

    def test_hot(self):
        report = batch_report(self.run(MHBT(gaussian, SGLD())))
        assert report.num_rows == N
        assert report.subsample_size == {"N": M}
        assert report.c_n == pytest.approx(N / report.temperature)
        assert report.accept_prob < report.accept_ceiling
        assert report.spread_inflation == pytest.approx(report.temperature**0.5)
        assert 1e-3 < report.ess_per_gradient < 1
        assert report.num_diverging == 0
        assert "times wider than the posterior; raise subsample_size" in report.verdict
        assert report.verdict in str(report)

    @slow
    def test_hotter_than_need_be(self):
        report = batch_report(self.run(MHBT(gaussian, SGLD(), c_n=5)))
        assert "noise near the target would allow T = " in report.verdict

    @slow
    def test_uncorrected_noise_counts(self):
        kernel = MHBT(gaussian, SGLD(), c_n=200, bias_correction=False)
        report = batch_report(self.run(kernel, num_samples=20_000))
        expected = np.sqrt(N / 200 / (1 - 200 / M))
        assert report.spread_inflation == pytest.approx(expected, rel=0.1)

    def test_loud(self):
        kernel = MHBT(gaussian, SGLD(), c_n=3000, bias_correction=False)
        with pytest.warns(UserWarning, match="noise variance .* are biased"):
            mcmc = self.run(kernel)
        with pytest.warns(UserWarning, match="noise variance"):
            assert not batch_report(mcmc).trusted

    def test_stuck(self):
        kernel = MHBT(gaussian, RandomWalk(1e4), c_n=20, adapt_step_size=False)
        with pytest.warns(UserWarning, match="accepted next to nothing"):
            mcmc = self.run(kernel)
        with pytest.warns(UserWarning, match="accepted next to nothing"):
            report = batch_report(mcmc)
        assert report.ess_per_gradient < 1e-3

    def test_unmixed(self):
        kernel = MHBT(gaussian, RandomWalk(1e-4), c_n=20, adapt_step_size=False)
        with pytest.warns(UserWarning, match=r"have not mixed: R-hat.*temper_prior"):
            batch_report(self.run(kernel))

    @slow
    def test_far_reference(self):
        control = Taylor(1, ref_params={"mu": jnp.ones(D)})
        kernel = MHBT(gaussian, SGLD(), control_variate=control, temperature=1.0)
        mcmc = self.run(kernel)
        with pytest.warns(UserWarning, match=r"away from the reference.*a better one"):
            batch_report(mcmc)

    def test_a_reference_that_was_found_is_not_blamed(self):
        found, given = (
            MHBT(gaussian, control_variate=Taylor(2, params))._settings
            for params in (None, {"mu": jnp.ones(D)})
        )
        assert "far from Gaussian" in reached(found)
        assert "Give a better one as `Taylor(2, ref_params=...)`" in reached(given)

    def test_constant_coordinates_are_no_stuck_chain(self):
        def model(y):
            mu = numpyro.sample("mu", dist.Normal(0, 100).expand([D]).to_event(1))
            numpyro.deterministic("padded", jnp.append(mu, 0.0))
            with numpyro.plate("N", len(y), subsample_size=M) as rows:
                numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[rows])

        report = batch_report(self.run(MHBT(model, SGLD(), c_n=20)))
        assert np.isfinite(report.r_hat)
        assert report.ess_per_gradient > 1e-3

    def test_noise_of_one_row_is_not_known(self):
        def model(y):
            mu = numpyro.sample("mu", dist.Normal(0, 10))
            with numpyro.plate("N", 2, subsample_size=1) as rows:
                numpyro.sample("y", dist.Normal(mu, 1), obs=y[rows, 0])

        with pytest.warns(UserWarning, match="does not show its own noise"):
            mcmc = self.run(MHBT(model, SGLD(), temperature=1.3))
        report = batch_report(mcmc)
        assert np.isnan(report.noise_variance)
        assert "raise subsample_size, since one row" in report.verdict

    def test_needs_a_finished_run_of_mhbt(self):
        with pytest.raises(ValueError, match=r"call `mcmc.run` first"):
            batch_report(make_mcmc(MHBT(gaussian)))
        walk = numpyro.infer.BarkerMH(gaussian)
        with pytest.raises(TypeError, match="needs a run of MHBT"):
            batch_report(make_mcmc(walk))
