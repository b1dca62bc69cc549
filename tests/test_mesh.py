"""
Rows spread over a mesh of devices.

In this process there are four devices, so two or four shards; eight of them, and
several processes, are in ``tests/mesh_run.py``, which is run apart.
"""

from contextlib import ExitStack
from functools import partial
import json
import os
from pathlib import Path
import re
import socket
import subprocess
import sys

import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import mesh_run
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest
from scipy import stats
from test_exact import FIXED, PLAIN, Exact, Y, all_batches, expanded
from test_exact import model as logistic

from numpyro_mhbt import (
    MHBT,
    RSGLD,
    Checkpoint,
    RandomWalk,
    Taylor,
    batch_report,
    untemper,
)
from numpyro_mhbt.control import Reference
from numpyro_mhbt.mesh import find_placement, numbered, on_devices
from numpyro_mhbt.setup import read
from numpyro_mhbt.target import make_evaluate


def mesh_of(*shape):
    names = ("chains", "data")[-len(shape) :]
    num = int(np.prod(shape))
    return Mesh(np.array(jax.devices()[:num]).reshape(shape), names)


def spread(mesh, *arrays):
    sharding = NamedSharding(mesh, P("data"))
    return [jax.device_put(x, sharding) for x in arrays]


def regression(x, y, size=None, m=80, style="subsample"):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("N", size or len(x), subsample_size=m) as rows:
        if style == "subsample":
            xb = numpyro.subsample(x, event_dim=1)
            yb = numpyro.subsample(y, event_dim=0)
        else:
            xb, yb = x[rows], y[rows]
        numpyro.sample("y", dist.Normal(xb @ w, 1), obs=yb)


def regression_data(n=400, dim=3):
    x = random.normal(random.key(0), (n, dim))
    return x, x @ jnp.arange(1.0, dim + 1) + random.normal(random.key(1), (n,))


def every_point(y, order, m, k, z=0.9, temperature=2.0, correct=False, gradient=True):
    """The point at ``z`` on every stratified batch."""
    fixed = partial(logistic, m=m)
    data, _ = read(fixed, tuple(spread(mesh_of(k), y)), {})
    data = data._replace(placement=find_placement(data))
    at, rows = 0.3, np.asarray(y, np.float64)[:, None]

    def log_p(mu):
        return jnp.sum(jax.scipy.stats.logistic.logpdf(rows, mu, 0.7))

    reference = None
    if order is not None:
        sums = (jax.grad(log_p)(at), jax.grad(jax.grad(log_p))(at))
        shaped = (jnp.reshape(s, (1,) * (i + 1)) for i, s in enumerate(sums[:order]))
        reference = Reference(jnp.array([at]), *shaped)
    _, unravel = ravel_pytree({"mu": jnp.array(0.0)})

    def evaluate(data, batch, reference):
        point = make_evaluate(
            fixed,
            data,
            unravel,
            jnp.array(temperature),
            reference,
            bias_correction=correct,
            temper_prior=True,
            gradient=gradient,
        )(jnp.array([z]), numbered(data, batch, -1))
        return point._replace(batch=None)

    batches = [np.concatenate(batch) for batch in all_batches(len(y), m, k)]
    run = jax.jit(
        lambda rows, reference: on_devices(
            jax.vmap(evaluate, in_axes=(None, 0, None)),
            data,
            {"N": rows},
            reference,
            in_specs=(P(None, "data"), P()),
        )
    )
    points = jax.tree.map(np.asarray, run(jnp.array(batches), reference))
    prior = stats.norm.logpdf(z, 0.5, 2)
    likelihood = stats.logistic.logpdf(rows, z, 0.7).sum()
    if order is not None:
        likelihood -= stats.logistic.logpdf(rows, at, 0.7).sum()
    slope = np.tanh((rows - z) / 1.4).sum() / 0.7 - (z - 0.5) / 4
    return points, (prior + likelihood) / temperature, slope / temperature


Y8 = jnp.array([-2.5, -1.0, -0.3, 0.4, 1.7, 4.0, 4.2, 7.0])


@pytest.mark.parametrize("order", [None, 0, 1, 2])
def test_all_stratified_batches_average_to_all_rows(order):
    """Four of eight rows in two shards: 36 batches."""
    points, value, slope = every_point(Y8, order, m=4, k=2)
    assert len(points.value) == 36
    assert np.isclose(points.value.mean(), value, rtol=1e-5)
    assert np.isclose(points.grad.mean(), slope, rtol=1e-4)
    # Within strata only: rows of two shards differ by more than those of one.
    assert np.isclose(points.noise_variance.mean(), points.value.var(), rtol=1e-4)


@pytest.mark.parametrize("order", [None, 0, 1, 2])
def test_the_correction_and_its_gradient(order):
    plain, *_ = every_point(Y8, order, m=4, k=2)
    corrected, *_ = every_point(Y8, order, m=4, k=2, correct=True)
    expected = plain.value - plain.noise_variance / 2
    assert np.allclose(corrected.value, expected, rtol=1e-5)
    step = 1e-2
    high, low = (
        every_point(Y8, order, m=4, k=2, z=0.9 + s, correct=True, gradient=False)[0]
        for s in (step, -step)
    )
    slope = (high.value - low.value) / (2 * step)
    assert np.allclose(corrected.grad[:, 0], slope, rtol=2e-3, atol=2e-3)


def test_four_shards_and_all_rows_of_each():
    points, value, slope = every_point(Y8, None, m=8, k=4)
    assert np.allclose(points.value, value, rtol=1e-5)
    assert np.allclose(points.grad, slope, rtol=1e-4)
    assert np.all(points.noise_variance == 0)


CASES = {
    "plain": ({"proposal": RandomWalk(1.5), "c_n": 3.0, **PLAIN}, (3.0,)),
    "order0": (
        {"proposal": RSGLD(1.0, 1.5), "c_n": 6.0, "control_variate": expanded(0)},
        (6.0, 0.3, 0, True),
    ),
    "order2": (
        {"proposal": RSGLD(1.0, 1.5), "c_n": 3.0, "control_variate": expanded(2)},
        (3.0, 0.3, 2, True),
    ),
    "blocks": ({"proposal": RSGLD(1.0), "c_n": 6.0, "num_blocks": 2, **PLAIN}, (6.0,)),
}


@pytest.mark.parametrize(
    "case",
    [c if c == "order0" else pytest.param(c, marks=pytest.mark.slow) for c in CASES],
)
def test_chains_sample_the_stratified_marginal(case):
    """Six rows in two shards, two drawn from each; chains over the other axis."""
    arguments, spec = CASES[case]
    exact = Exact(*spec, m=4, strata=2)
    if case != "order2":  # it matters: a uniform draw of four has another marginal
        assert abs(Exact(*spec, m=4).variance / exact.variance - 1) > 0.02
    kernel = MHBT(partial(logistic, m=4), **arguments, **FIXED)
    (y,) = spread(mesh_of(2, 2), Y)
    exact.assert_sampled_by(kernel, y=y, jit_model_args=True)


def test_each_device_draws_its_own_rows():
    kernel = MHBT(regression, c_n=10.0, **PLAIN)
    args = tuple(spread(mesh_of(4), *regression_data()))
    state = kernel.init(random.split(random.key(0), 300), 0, None, args, {})
    rows = np.asarray(state.batch["N"]).reshape(300, 4, 20)
    assert np.all(rows // 100 == np.arange(4)[:, None])
    assert all(np.unique(shard).size == 20 for chain in rows for shard in chain)
    local = rows - 100 * np.arange(4)[:, None]
    counts = np.stack([np.bincount(r.ravel(), minlength=100) for r in local[:, 0]])
    other = np.stack([np.bincount(r.ravel(), minlength=100) for r in local[:, 1]])
    # Of no two devices the same: 20 of 100 rows agree by chance in 20 * 20 / 100.
    shared = np.sum(counts * other, axis=1)
    assert abs(shared.mean() - 4) < 4 * shared.std() / np.sqrt(300)


def collectives(program):
    """Name and number of elements of each message in a compiled program."""
    pattern = (
        r"= (?:\()?\w+\[([\d,]*)\].*? (all-reduce|all-gather|all-to-all|"
        r"collective-permute|reduce-scatter|collective-broadcast)(?:-start)?\("
    )
    found = re.findall(pattern, program.as_text())
    return [
        (name, int(np.prod([int(n) for n in shape.split(",") if n])))
        for shape, name in found
    ]


@pytest.mark.parametrize("order", [0, 2])
def test_what_crosses_the_network_is_a_gradient(order):
    """With the postprocessing that NumPyro does at each step."""
    dim = 7
    kernel = MHBT(regression, control_variate=Taylor(order), c_n=100.0)
    args = tuple(spread(mesh_of(2, 2), *regression_data(dim=dim)))
    keys = random.split(random.key(0), 6)
    state = kernel.init(keys, 10, None, args, {})

    def step(state, *args):
        state = kernel.sample(state, args, {})
        return state, jax.vmap(kernel.postprocess_fn(args, {}))(state.z)

    found = collectives(jax.jit(step).lower(state, *args).compile())
    # For half of the chains a gradient, value, energy and noise: of the new point and,
    # in a branch, of the current one. A fingerprint of the data at times.
    evaluations = [size for name, size in found if size > 1]
    assert evaluations == [3 * (dim + 3)] * 2
    assert {name for name, _ in found} == {"all-reduce"}
    assert len(found) <= 3


def test_collectives_are_seen():
    x, _ = spread(mesh_of(4), *regression_data())
    whole = jax.jit(lambda x: jnp.sort(x, axis=0)).lower(x).compile()
    assert ("all-gather", 1200) in collectives(whole)


def test_chains_are_spread_over_the_other_axis():
    mesh = mesh_of(2, 2)
    x, y = spread(mesh, *regression_data())
    kernel = MHBT(regression, c_n=20.0)
    mcmc = MCMC(
        kernel,
        num_warmup=20,
        num_samples=10,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(0), x, y)
    state = mcmc.last_state
    assert state.batch["N"].sharding.spec == P("chains", "data")
    assert state.rng_key.sharding.spec[0] == "chains"
    for leaf in jax.tree.leaves((state.z, state.z_grad, state.adapt_state)):
        assert leaf.sharding.spec[0] == "chains", leaf
    draws = mcmc.get_samples(group_by_chain=True)["w"]
    assert draws.shape == (4, 10, 3)
    assert {shard.data.shape for shard in draws.addressable_shards} == {(2, 10, 3)}
    first = draws[:, -1, 0]
    assert np.unique(np.asarray(first)).size == 4


@pytest.mark.parametrize("style", ["subsample", "index"])
@pytest.mark.parametrize("written", [False, True])
def test_plates_of_any_spelling(style, written):
    """Their size from the data or as a number, rows by ``subsample`` or by index."""
    args = regression_data()
    model = partial(regression, style=style, size=400 if written else None)
    kernel = MHBT(model, c_n=10.0, **PLAIN)
    z = {"w": jnp.array([0.9, 2.1, 2.8])}
    state = kernel.init(random.key(0), 0, z, tuple(spread(mesh_of(4), *args)), {})
    x, y = (np.asarray(a, np.float64) for a in args)
    rows = np.asarray(state.batch["N"])
    log_p = stats.norm.logpdf(y, x @ np.asarray(z["w"], np.float64))
    prior = stats.norm.logpdf(z["w"]).sum()
    assert np.isclose(state.potential_energy, -(prior + 5 * log_p[rows].sum()), 1e-5)
    within = log_p[rows].reshape(4, 20).var(axis=1, ddof=1).sum()
    expected = (1 - 0.2) * 100**2 / 20 * within / 40**2
    assert np.isclose(state.noise_variance, expected, rtol=1e-4)


def test_a_run_and_what_is_asked_of_it_after():
    """Passes over all rows, warm-up, report and weights, against the conjugate."""
    x, y = regression_data(n=800)
    precision = np.eye(3) + np.asarray(x, np.float64).T @ np.asarray(x, np.float64)
    mean = np.linalg.solve(precision, np.asarray(x.T @ y, np.float64))
    covariance = np.linalg.inv(precision)
    mcmc = MCMC(
        MHBT(partial(regression, m=200), temperature=3.0, control_variate=Taylor(2)),
        num_warmup=300,
        num_samples=3000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(3), *spread(mesh_of(4), x, y))
    report = batch_report(mcmc)
    assert report.subsample_size == {"N": 200} and report.num_rows == 800
    found = untemper(mcmc)
    w = found.samples["w"]
    error = np.sqrt(np.diag(covariance) / found.ess)
    assert np.all(np.abs(w.mean(0) - mean) < 5 * error)
    assert np.allclose(w.std(0), np.sqrt(np.diag(covariance)), rtol=0.15)


@pytest.mark.parametrize(
    "chosen", [Taylor(1), pytest.param(None, marks=pytest.mark.slow)]
)
def test_temperature_is_about_that_of_one_device(chosen):
    """The search, the passes and the noise at typical points are of all rows."""
    args = regression_data(n=800, dim=2)

    def temperature(*args):
        kernel = MHBT(partial(regression, m=160), control_variate=chosen)
        state = kernel.init(random.key(0), 100, None, args, {})
        noise = state.shared.noise
        return float(state.temperature), noise and float(noise.variance)

    one, some = temperature(*args), temperature(*spread(mesh_of(4), *args))
    assert np.isclose(one[0], some[0], rtol=0.2)
    if chosen is not None:
        assert np.isclose(one[1], some[1], rtol=0.2, atol=1e-3)


def run_of(kernel, *args, **kwargs):
    mcmc = MCMC(kernel, num_warmup=2, num_samples=2, progress_bar=False, **kwargs)
    mcmc.run(random.key(0), *args)


def two_plates(x, y):
    mu = numpyro.sample("mu", dist.Normal())
    for name, data in ("A", x), ("B", y):
        with numpyro.plate(name, len(data), subsample_size=80):
            obs = numpyro.subsample(data, 0)
            numpyro.sample(f"of_{name}", dist.Normal(mu), obs=obs)


def wide_prior(x, y):
    mu = numpyro.sample("mu", dist.Normal(0, len(y)))
    with numpyro.plate("N", len(y), subsample_size=80):
        numpyro.sample("y", dist.Normal(mu), obs=numpyro.subsample(y, 0))


def data_outside(x, y):
    mu = numpyro.sample("mu", dist.Normal())
    numpyro.sample("mean", dist.Normal(mu, 1), obs=jnp.mean(y))
    with numpyro.plate("N", len(y), subsample_size=80):
        numpyro.sample("y", dist.Normal(mu), obs=numpyro.subsample(y, 0))


def test_errors_say_what_to_do():
    x, y = regression_data()
    xs, ys = spread(mesh_of(4), x, y)

    def refused(text, model, *args, error=ValueError, jit_model_args=True, **kwargs):
        with pytest.raises(error, match=text):
            kernel = MHBT(model, c_n=10.0, **PLAIN)
            run_of(kernel, *args, jit_model_args=jit_model_args, **kwargs)

    odd, few = partial(regression, m=82), partial(regression, m=4)
    refused("plate 'N' has subsample_size=82.*multiple of 4", odd, xs, ys)
    refused("plate 'N' has subsample_size=4 .*8 in all", few, xs, ys)
    refused(r"Argument \[1\] has as many rows as plate 'N'", regression, xs, y)
    refused("different ways", regression, xs, spread(mesh_of(2, 2), y)[0])
    short = partial(regression, size=300, style="index")
    refused("has 400 sharded rows, but plate 'N' has 300", short, xs, ys)
    refused("'A', 'B'", two_plates, ys, ys, error=NotImplementedError)
    refused("jit_model_args=True", regression, xs, ys, jit_model_args=False)
    refused("prior is another", wide_prior, xs, ys)
    refused("likelihood outside", data_outside, xs, ys)
    vectorized = "chain_method='vectorized'"
    refused(vectorized, regression, xs, ys, num_chains=2, chain_method="parallel")
    wide = jax.device_put(
        x @ jnp.ones((3, 4)), NamedSharding(mesh_of(4), P(None, "data"))
    )
    refused("only rows", regression, wide, ys)
    explicit = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    typed = jax.device_put(x, NamedSharding(explicit, P("data")))
    refused("explicit axes", regression, typed, ys)
    refused(
        "'y' is NaN at row 301 of plate 'N'",
        regression,
        *spread(mesh_of(4), x, y.at[301].set(jnp.nan)),
    )


@pytest.fixture(scope="module")
def posterior():
    """Mean and standard deviation of each weight, by quadrature."""
    x, y = (np.asarray(a, np.float64) for a in mesh_run.rows())
    axes = [np.linspace(c - 0.3, c + 0.3, 61) for c in (1.0, -0.5)]
    w = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 2)
    log_p = stats.norm.logpdf(w).sum(1)
    for part in np.array_split(np.arange(len(y)), 20):
        logits = w @ x[part].T
        log_p += (y[part] * logits - np.logaddexp(0, logits)).sum(1)
    p = np.exp(log_p - log_p.max())
    p /= p.sum()
    mean = p @ w
    return mean, np.sqrt(p @ (w - mean) ** 2)


def launch(directory, shared, *own):
    """The last line that each process prints, once all have ended."""
    command = [sys.executable, str(Path(mesh_run.__file__)), *shared]
    # Not to pipes: a process that waits for a reader keeps the others from ending.
    logs = [directory / f"{i}.log" for i in range(len(own))]
    quick = {**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    with ExitStack() as stack:
        started = []
        for options, log in zip(own, logs, strict=True):
            out = stack.enter_context(log.open("w"))
            process = subprocess.Popen(
                [*command, *options], env=quick, stdout=out, stderr=subprocess.STDOUT
            )
            stack.callback(process.kill)
            started.append(process)
        codes = [process.wait(timeout=240) for process in started]
    said = [log.read_text() for log in logs]
    assert not any(codes), "".join(said)
    return [json.loads(text.splitlines()[-1]) for text in said]


def assert_of_posterior(draws, posterior):
    mean, sd = posterior
    draws = np.asarray(draws)
    worth = np.minimum(effective_sample_size(draws), draws.shape[0] * draws.shape[1])
    assert np.all(worth > 500)
    assert np.all(np.abs(draws.mean((0, 1)) - mean) < 4 * sd / np.sqrt(worth))
    # Of a variance the relative error is sqrt(2 / ESS).
    ratio = draws.var((0, 1)) / sd**2
    assert np.all(np.abs(ratio - 1) < 4 * np.sqrt(2 / worth))


def test_eight_devices_in_one_process(posterior, tmp_path):
    (found,) = launch(tmp_path, ["--devices", "8", "--chain-groups", "2"], [])
    assert found["devices"] == 8 and found["processes"] == 1
    assert found["rows"] == [mesh_run.N // 4] * 8
    assert "chains" in found["chains"]
    assert found["temperature"] == 1
    assert_of_posterior(found["draws"], posterior)


def test_several_processes(posterior, tmp_path):
    """Two of them with two devices each; all that they share goes over loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = ["--devices", "2", "--num-processes", "2"]
    shared += ["--coordinator", f"127.0.0.1:{port}"]
    own = [["--process-id", "0"], ["--process-id", "1"]]
    first, second = launch(tmp_path, shared, *own)
    assert first["devices"] == second["devices"] == 4
    assert first["processes"] == second["processes"] == 2
    assert first["rows"] == second["rows"] == [mesh_run.N // 4] * 2
    assert first["draws"] == second["draws"]
    assert first["temperature"] == 1
    assert_of_posterior(first["draws"], posterior)


def test_checkpoints_are_refused_by_name(tmp_path):
    mcmc = MCMC(MHBT(regression), num_warmup=1, num_samples=1, jit_model_args=True)
    data = spread(mesh_of(2), *regression_data())
    path = tmp_path / "run"
    with pytest.raises(NotImplementedError, match="sharded data"):
        Checkpoint(path).run(mcmc, random.key(0), *data)
    assert not path.exists()
