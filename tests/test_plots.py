"""What the pictures show, beside numbers found another way."""

from functools import cache
import subprocess
import sys

from jax import random
import jax.numpy as jnp
import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest
from scipy import optimize, stats
from scipy.signal import lfilter
import xarray as xr

from numpyro_mhbt import MHBT, plots

matplotlib.use("Agg")

N, M, T, WARMUP, DRAWS = 60, 20, 5.0, 40, 400
Y = 0.2 + random.normal(random.key(0), (N,))
COUNTS = jnp.asarray(stats.poisson(1.5).rvs(N, random_state=0), jnp.float32)
FIELDS = (
    "accept_prob",
    "beta",
    "forward",
    "mean_noise_variance",
    "noise_variance",
    "step_size",
)


def model(y, counts):
    a = numpyro.sample("a", dist.Normal(0, 0.3))
    rate = numpyro.sample("rate", dist.Gamma(3.0, 1.0))
    numpyro.sample("w", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("N", len(y), subsample_size=M):
        yb, cb = (numpyro.subsample(x, event_dim=0) for x in (y, counts))
        numpyro.sample("y", dist.Normal(a, 1), obs=yb)
        numpyro.sample("counts", dist.Poisson(rate), obs=cb)


def tempered(temper_prior):
    """The posterior of a and rate, raised to 1/T."""
    heat = T if temper_prior else 1.0
    precision = 0.3**-2 / heat + N / T
    a = stats.norm(float(Y.sum()) / T / precision, precision**-0.5)
    shape = 1 + 2 / heat + float(COUNTS.sum()) / T
    return a, stats.gamma(shape, scale=1 / (1 / heat + N / T))


def make(**settings):
    settings = {"temperature": T, "num_blocks": 2, **settings}
    return MCMC(
        MHBT(model, **settings),
        num_warmup=WARMUP,
        num_samples=DRAWS,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )


@cache
def run(fields=FIELDS, **settings):
    mcmc = make(**settings)
    mcmc.run(random.key(1), Y, COUNTS, extra_fields=fields)
    return mcmc


@pytest.fixture(autouse=True)
def no_figure_stays():
    yield
    plt.close("all")


def by_label(ax):
    return {line.get_label(): line for line in ax.get_lines()}


def posterior(temperature=None, **draws):
    """As ArviZ has it."""
    variables = {
        name: (("chain", "draw", *(f"d{i}" for i in range(x.ndim - 2))), x)
        for name, x in draws.items()
    }
    attrs = {} if temperature is None else {"temperature": temperature}
    return {"posterior": xr.Dataset(variables, attrs=attrs)}


@pytest.mark.parametrize("temper_prior", [True, False])
def test_contours_are_those_of_the_conjugate_posterior(temper_prior):
    ax = plots.plot_contours(run(temper_prior=temper_prior))
    a, rate = tempered(temper_prior)
    exact = a.rvs(10**5, random_state=0), rate.rvs(10**5, random_state=1)
    heights = a.logpdf(exact[0]) + rate.logpdf(exact[1])
    (lines,) = ax.collections
    for path, mass in zip(lines.get_paths(), (0.99, 0.9, 0.5), strict=True):
        x, y = path.vertices.T
        height = a.logpdf(x) + rate.logpdf(y)
        # One height all along it, and so much of the mass within.
        assert np.ptp(height) < 0.15
        assert np.mean(heights > height.mean()) == pytest.approx(mass, abs=0.01)
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("a", "rate")
    assert (
        "T = 5\n(2 other coordinates at their mean)"
        in ax.get_legend_handles_labels()[1][1]
    )
    shown = by_label(ax)["draws"].get_xydata()
    draws = run(temper_prior=temper_prior).get_samples()
    np.testing.assert_allclose(shown, np.stack([draws["a"], draws["rate"]], -1))


def test_contours_of_other_coordinates_end_where_the_support_does():
    axes = plt.subplots()[1]
    ax = plots.plot_contours(run(), ["rate", "w[1]"], grid_size=30, ax=axes)
    assert ax is axes
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("rate", "w[1]")
    assert all(p.vertices[:, 0].min() > 0 for p in ax.collections[0].get_paths())
    draws = np.asarray(run().get_samples()["w"])
    np.testing.assert_allclose(by_label(ax)["draws"].get_ydata(), draws[:, 1])


def test_levels_move_with_the_constant_of_a_log_density():
    """The corner of the grid, of which it is the difference, may be far below."""
    normal = stats.norm.logpdf(np.linspace(-5, 5, 1001))
    levels = plots._levels(normal)
    np.testing.assert_allclose(plots._levels(normal + 1e4), np.add(levels, 1e4))


def test_coordinates_that_cannot_vary_alone_are_refused():
    def simplex(counts):
        p = numpyro.sample("p", dist.Dirichlet(jnp.ones(4)))
        with numpyro.plate("N", len(counts), subsample_size=M):
            cb = numpyro.subsample(counts, event_dim=0)
            numpyro.sample("counts", dist.Categorical(p), obs=cb)

    kernel = MHBT(simplex, temperature=2)
    mcmc = MCMC(kernel, num_warmup=5, num_samples=20, progress_bar=False)
    mcmc.run(random.key(0), jnp.minimum(COUNTS, 3).astype(int))
    with pytest.raises(ValueError, match=r"'p\[1\]'\] cannot vary"):
        plots.plot_contours(mcmc)


@pytest.mark.parametrize("names", [["a"], ["w", "a"]])
def test_contours_need_two_coordinates(names):
    with pytest.raises(ValueError, match="needs two coordinates"):
        plots.plot_contours(run(), names)


@pytest.mark.parametrize("name", ["b", "a[0]", "w[0, 0]", "w[2]"])
def test_coordinates_that_are_not_there_are_named(name):
    with pytest.raises(ValueError, match="no coordinate '" + name[0]):
        plots.plot_modes(run(), name)


def test_moves_between_modes_are_counted():
    draws = np.array(
        [
            # There and back; what only crosses the split does not count.
            [-2, -2, -0.1, 0.1, -2, 2, 2, 0.1, -0.1, 2, -2, -2],
            # From one chain to the next is no move.
            [2, 2, -0.5, 2, 2, 0.1, 2, 2, 2, 2, 2, -2],
        ]
    )
    ax = plots.plot_modes(posterior(x=draws), split=0.0)
    assert ax.get_legend().get_title().get_text() == "3 moves between modes"
    lines = by_label(ax)
    above = lines["above 0: 62% of the draws"].get_ydata()
    np.testing.assert_array_equal(above, draws[draws > 0])
    below = lines["below 0: 38% of the draws"].get_ydata()
    np.testing.assert_array_equal(below, draws[draws < 0])
    positions = lines["above 0: 62% of the draws"].get_xdata()
    np.testing.assert_array_equal(positions, np.flatnonzero(draws.ravel() > 0))


def test_modes_are_split_where_the_density_is_lowest():
    rng = np.random.default_rng(0)
    first, second = stats.norm(-2, 0.5), stats.norm(3, 1.0)
    upper = rng.random((2, 4000)) < 0.3
    two = np.where(upper, second.rvs(upper.shape, rng), first.rvs(upper.shape, rng))
    one = np.stack([rng.normal(size=two.shape), two], -1)
    ax = plots.plot_modes(posterior(x=one))
    assert ax.get_ylabel() == "x[1]"
    density = lambda x: 0.7 * first.pdf(x) + 0.3 * second.pdf(x)  # noqa: E731
    lowest = optimize.minimize_scalar(density, bounds=(-2, 3), method="bounded").x
    found = next(x for x in ax.get_lines() if x.get_linestyle() == "--").get_ydata()[0]
    assert abs(found - lowest) < 0.5
    shares = [label for label in by_label(ax) if "of the draws" in label]
    assert f"{100 * np.mean(two > found):.0f}%" in shares[0]


def test_one_mode_is_not_split_by_a_far_draw():
    draws = np.random.default_rng(0).normal(size=(1, 2000))
    draws[0, 0] = 30
    ax = plots.plot_modes(posterior(x=draws))
    assert ax.get_legend().get_title().get_text() == "one mode seen"


def test_one_mode_is_not_split_where_chains_linger():
    noise = np.random.default_rng(0).normal(size=(20, 2, 3000))
    for run in lfilter([1.0], [1.0, -0.99], noise):
        ax = plots.plot_modes(posterior(x=run))
        assert ax.get_legend().get_title().get_text() == "one mode seen"
        plt.close("all")


def test_acceptance_by_kind_below_its_ceiling():
    ax = plots.plot_acceptance(run())
    fields = run().get_extra_fields(group_by_chain=True)
    lines = by_label(ax)
    ceiling = lines["ceiling that noise sets"]
    v = np.median(fields["mean_noise_variance"], axis=0) / 2  # blocks
    expected = 2 * stats.norm.cdf(-np.sqrt(v / 2))
    np.testing.assert_allclose(ceiling.get_ydata(), expected, rtol=1e-4)
    numbers = np.arange(WARMUP + 1, WARMUP + DRAWS + 1)
    np.testing.assert_array_equal(ceiling.get_xdata(), numbers)
    for kind, value in (("forward", 1), ("backward", 0)):
        found = [
            (WARMUP + 1 + i, float(fields["accept_prob"][chain, i]))
            for i in range(DRAWS)
            for chain in range(2)
            if fields["forward"][chain, i] == value
        ]
        per_block = -(-len(found) // max(1, len(found) // 50))
        line = lines[kind].get_xydata()
        np.testing.assert_allclose(line[0], np.mean(found[:per_block], 0), rtol=1e-5)
        assert len(line) == max(1, len(found) // 50)


def test_moves_of_several_steps_are_not_told_apart():
    fields = ("accept_prob", "mean_noise_variance")
    mcmc = run(fields, steps_per_draw=2)
    lines = by_label(plots.plot_acceptance(mcmc))
    assert set(lines) == {"all moves", "ceiling that noise sets"}
    mean = float(np.mean(mcmc.get_extra_fields()["accept_prob"]))
    assert np.mean(lines["all moves"].get_ydata()) == pytest.approx(mean, rel=1e-4)


def test_noise_beside_its_target():
    ax = plots.plot_noise(run(target_noise=0.7))
    fields = run(target_noise=0.7).get_extra_fields(group_by_chain=True)
    noise = np.asarray(fields["noise_variance"])
    lines = by_label(ax)
    assert set(lines["target 0.7"].get_ydata()) == {0.7}
    np.testing.assert_allclose(lines["draws"].get_ydata(), noise.T.ravel(), rtol=1e-6)
    # 800 values in 16 blocks of 25 draws of two chains.
    x, y = lines["their running median"].get_xydata().T
    expected = [np.median(noise[:, k : k + 25]) for k in range(0, DRAWS, 25)]
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    np.testing.assert_allclose(x, WARMUP + 13 + 25 * np.arange(16))
    fresh = lines["mean so far, on fresh batches"].get_ydata()
    means = np.asarray(fields["mean_noise_variance"])
    np.testing.assert_allclose(fresh, means.mean(0), rtol=1e-6)  # median of two


def test_tuning_in_warm_up():
    mcmc = make()
    fields = ("step_size", "beta")
    mcmc.warmup(random.key(1), Y, COUNTS, extra_fields=fields, collect_warmup=True)
    axes = plots.plot_tuning(mcmc)
    found = mcmc.get_extra_fields(group_by_chain=True)
    assert len(axes) == 2
    for ax, field in zip(axes, fields, strict=True):
        for chain, line in enumerate(ax.get_lines()):
            np.testing.assert_allclose(line.get_ydata(), found[field][chain])
            np.testing.assert_array_equal(line.get_xdata(), 1 + np.arange(WARMUP))
    assert np.ptp(axes[0].get_lines()[0].get_ydata()) > 0
    mcmc.run(random.key(2), Y, COUNTS, extra_fields=fields)
    (line, _) = plots.plot_tuning(mcmc, axes=axes)[0].get_lines()[-2:]
    assert line.get_xdata()[0] == WARMUP + 1
    assert np.ptp(line.get_ydata()) == 0


def test_spread_by_temperature():
    rng = np.random.default_rng(0)
    runs = [
        posterior(t, x=sd * rng.normal(size=(4, 5000)))
        for t, sd in ((100.0, 5.0), (4.0, 1.0), (9.0, 1.5))
    ]
    ax = plots.plot_temperatures(runs)
    ((points, _, (bars,)),) = ax.containers
    np.testing.assert_array_equal(points.get_xdata(), [4, 9, 100])
    sds = [runs[k]["posterior"]["x"].values.std() for k in (1, 2, 0)]
    np.testing.assert_allclose(points.get_ydata(), np.array(sds) / sds[0])
    x, y = by_label(ax)["sqrt(T)"].get_xydata().T
    np.testing.assert_allclose(y, np.sqrt(x) / 2)
    # Two standard errors of a ratio of standard deviations of 20000 normal draws.
    lengths = [np.ptp(bar[:, 1]) / 2 for bar in bars.get_segments()]
    expected = 2 * points.get_ydata() / np.sqrt(20_000)
    np.testing.assert_allclose(lengths[1:], expected[1:], rtol=0.15)


def test_temperatures_of_runs():
    runs = [run(), run(temperature=20.0)]
    ax = plots.plot_temperatures(runs, ["w"])
    assert {c.get_label() for c in ax.containers} == {"w[0]", "w[1]"}
    np.testing.assert_allclose(ax.containers[0][0].get_xdata(), [5, 20])
    with pytest.raises(ValueError, match="needs two temperatures"):
        plots.plot_temperatures(runs[:1])
    with pytest.raises(ValueError, match="no temperature"):
        plots.plot_temperatures([posterior(x=np.ones((1, 4)))])


@pytest.mark.parametrize(
    "plot, field",
    [
        (plots.plot_acceptance, "forward"),
        (plots.plot_noise, "noise_variance"),
        (plots.plot_tuning, "step_size"),
    ],
)
def test_fields_that_were_not_collected_are_named(plot, field):
    with pytest.raises(ValueError, match=rf"extra_fields=\(.*'{field}'"):
        plot(run(("accept_prob",)))


def test_runs_of_other_kernels_are_refused():
    with pytest.raises(TypeError, match="plot_noise needs a run of MHBT"):
        plots.plot_noise(MCMC(NUTS(model), num_warmup=1, num_samples=1))


def test_neither_arviz_nor_matplotlib_is_imported_before_it_is_needed():
    program = (
        "import sys, numpyro_mhbt; numpyro_mhbt.plots.plot_modes;"
        "print([m for m in ('arviz', 'matplotlib', 'xarray') if m in sys.modules])"
    )
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, text=True).strip() == "[]"
