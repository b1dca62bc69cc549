"""Rows that spoil an expansion are part of every step."""

import pickle

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.diagnostics import effective_sample_size
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest

from numpyro_mhbt import MHBT, Taylor, batch_report, full_data
from numpyro_mhbt.plates import are_among
from numpyro_mhbt.prepare import _is_close
from numpyro_mhbt.temperature import Curvature

N, M = 4000, 100
RARE = np.array([17, 1800, 1801, 3999])


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("N", len(x), subsample_size=M) as idx:
        numpyro.sample("y", dist.Bernoulli(logits=x[idx] @ w), obs=y[idx])


def rare_category():
    """Two columns that all rows inform, and one that four rows do."""
    rng = np.random.default_rng(0)
    x = np.concatenate([0.3 * rng.standard_normal((N, 2)), np.zeros((N, 1))], axis=1)
    x[RARE, 2] = 20.0
    y = rng.uniform(size=N) < 1 / (1 + np.exp(-x[:, 0] + x[:, 1]))
    y[RARE] = [1, 1, 1, 1]
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.int32)


def run(kernel, *args, seed=0, **kwargs):
    options = {"num_warmup": 1000, "num_samples": 4000, "num_chains": 4}
    options |= {"chain_method": "vectorized", "progress_bar": False} | kwargs
    mcmc = MCMC(kernel, **options)
    mcmc.run(random.key(seed), *args)
    return mcmc


def test_rows_among_others():
    rows = jnp.array([3, 0, 9, 5, 4])
    assert are_among(rows, jnp.array([0, 4, 5])).tolist() == [0, 1, 0, 1, 1]
    assert not are_among(rows, jnp.array([7])).any()


@pytest.fixture(scope="module")
def on_all_rows():
    mcmc = run(NUTS(full_data(model)), *rare_category(), seed=1, num_samples=1000)
    return np.asarray(mcmc.get_samples(True)["w"])


@pytest.mark.parametrize("order", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_posterior_with_a_rare_category(order, on_all_rows, recwarn):
    """Its rows are found, T = 1 is chosen, and draws are those of NUTS on all rows."""
    data = rare_category()
    ours = run(MHBT(model, control_variate=Taylor(order=order)), *data)
    report = batch_report(ours)
    assert not [w for w in recwarn if "MHBT" in str(w.message)]
    assert report.temperature == 1 and report.trusted
    always = np.asarray(ours.last_state.shared.reference.always)[0]
    assert set(RARE) <= set(always.tolist()) and len(always) == report.exact_rows
    assert f"and {len(always)} in every step" in str(report)

    center, spread = on_all_rows.mean((0, 1)), on_all_rows.std((0, 1))
    for power in (1, 2):
        means, errors = [], []
        for draws in (np.asarray(ours.get_samples(True)["w"]), on_all_rows):
            values = ((draws - center) / spread) ** power
            means.append(values.mean((0, 1)))
            size = effective_sample_size(values)
            errors.append(values.std((0, 1)) / np.sqrt(size))
        error = np.hypot(*errors)
        assert np.all(error < 0.1)  # or a wrong spread would not show
        assert np.all(np.abs(means[0] - means[1]) < 4 * error), power


def test_reference_is_near_the_mode_in_every_coordinate():
    """One that is three standard deviations away does not hide behind many others."""
    none = np.zeros(40), np.zeros((40, 40))

    def is_close(*away):
        grad = np.zeros(40)
        grad[: len(away)] = away
        return _is_close(Curvature(jnp.zeros(40), (grad, -np.eye(40)), none), 1.0)

    assert is_close() and is_close(0.9, -0.9)
    assert not is_close(3.0) and not is_close(*40 * [0.6])


def test_none_of_them_if_told():
    kernel = MHBT(model, control_variate=Taylor(order=2, exact_rows=0))
    with pytest.warns(UserWarning, match="What Taylor.order=2. misses is too large"):
        mcmc = run(kernel, *rare_category(), num_warmup=10, num_samples=10)
    assert mcmc.last_state.shared.reference.always is None
    with pytest.warns(UserWarning, match="misses.*Chains have not mixed") as caught:
        batch_report(mcmc)
    assert str(caught[0].message).count("The usual cause") == 1  # of both


@pytest.mark.filterwarnings("ignore:MHBT. Chains have not mixed")
def test_none_of_them_where_all_is_well():
    x, y = rare_category()
    x = x.at[RARE, 2].set(0.0)
    mcmc = run(
        MHBT(model, control_variate=Taylor(order=2)), x, y,
        num_warmup=10, num_samples=10,
    )  # fmt: skip
    assert mcmc.last_state.shared.reference.always is None
    assert "every step" not in str(batch_report(mcmc))


def test_a_limit_too_low_is_as_none():
    kernel = MHBT(model, control_variate=Taylor(order=2, exact_rows=3))
    with pytest.warns(UserWarning, match="What Taylor.order=2. misses is too large"):
        mcmc = run(kernel, *rare_category(), num_warmup=10, num_samples=10)
    assert mcmc.last_state.shared.reference.always is None


@pytest.mark.parametrize("wrong", [-1, 2.5])
def test_wrong_number(wrong):
    with pytest.raises(ValueError, match="exact_rows"):
        Taylor(order=2, exact_rows=wrong)
    assert Taylor(order=2, exact_rows=np.int64(5)).exact_rows == 5


@pytest.mark.slow
def test_chain_methods_and_resume():
    kernel = MHBT(model, control_variate=Taylor(order=2))
    data = rare_category()
    options = {"num_chains": 2, "num_warmup": 50, "num_samples": 40}
    draws = {}
    for method in ("vectorized", "sequential"):
        mcmc = run(kernel, *data, chain_method=method, **options)
        draws[method] = mcmc.get_samples()["w"]
    assert np.allclose(draws["vectorized"], draws["sequential"], atol=1e-3)
    again = pickle.loads(pickle.dumps(mcmc))
    for each in (mcmc, again):
        each.post_warmup_state = each.last_state
        each.run(random.key(5), *data)
    assert np.array_equal(mcmc.get_samples()["w"], again.get_samples()["w"])
    assert not np.array_equal(mcmc.get_samples()["w"], draws["sequential"])
    jax.block_until_ready(mcmc.last_state)
