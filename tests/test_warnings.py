"""A warning names the line of the user, and says nothing that another one denies."""

from concurrent.futures import ThreadPoolExecutor
import linecache
import re

import jax
from jax import random
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_mhbt import (
    MHBT,
    RandomWalk,
    Taylor,
    advice,
    batch_report,
    prepare,
    to_arviz,
    watch,
)
from numpyro_mhbt.plates import Plate

ROWS, BATCH = 200, 20
Y = random.normal(random.key(0), (ROWS,))


def mean(y, subsample_size=BATCH):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("N", len(y), subsample_size=subsample_size):
        numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))


def make_mcmc(kernel, **options):
    given = {"num_warmup": 20, "num_samples": 20, "num_chains": 2}
    given |= {"chain_method": "vectorized", "progress_bar": False}
    return MCMC(kernel, **(given | options))


def lines(caught):
    """Of this file, as the console shows them below each of our warnings."""
    ours = [w for w in caught if str(w.message).startswith("MHBT: ")]
    assert ours
    assert {w.filename for w in ours} == {__file__}
    return {linecache.getline(w.filename, w.lineno).strip() for w in ours}


def stuck():
    """Nothing is ever accepted, which is seen from inside the compiled program."""
    return MHBT(mean, RandomWalk(1e6), temperature=10, adapt_step_size=False)


def test_of_the_model():
    mcmc = make_mcmc(MHBT(mean))
    with pytest.warns(UserWarning, match="no plate of the model") as caught:
        mcmc.run(random.key(0), Y, None)
    assert lines(caught) == {"mcmc.run(random.key(0), Y, None)"}


def test_of_the_data(monkeypatch):
    """Said where NumPyro compiles the draw, deep in JAX."""
    monkeypatch.setattr(watch, "_LARGE", 1)
    mcmc = make_mcmc(MHBT(mean))
    with pytest.warns(UserWarning, match="compiled into the program") as caught:
        mcmc.run(random.key(0), Y)
    assert lines(caught) == {"mcmc.run(random.key(0), Y)"}


@pytest.mark.filterwarnings("ignore:Some donated buffers")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chain_method": "sequential", "progress_bar": True},
        {"chain_method": "parallel"},
    ],
    ids=["vectorized", "sequential", "parallel"],
)
def test_while_a_run_goes_on(options):
    mcmc = make_mcmc(stuck(), **options)
    with pytest.warns(UserWarning, match="accepted next to nothing") as caught:
        mcmc.run(random.key(0), Y)
        jax.block_until_ready(mcmc.last_state)
    # JAX may have let the main thread go on.
    allowed = {"mcmc.run(random.key(0), Y)", "jax.block_until_ready(mcmc.last_state)"}
    assert lines(caught) <= allowed


def test_in_a_thread_of_the_user():
    mcmc = make_mcmc(stuck())

    def work():
        mcmc.run(random.key(1), Y)
        mcmc.last_state.i.block_until_ready()

    with (
        pytest.warns(UserWarning, match="accepted next to nothing") as caught,
        ThreadPoolExecutor(1) as pool,
    ):
        waiting = pool.submit(work)
        waiting.result()
    assert lines(caught) <= {
        "mcmc.run(random.key(1), Y)",
        "mcmc.last_state.i.block_until_ready()",
        "waiting.result()",
    }


def test_after_a_run():
    mcmc = make_mcmc(stuck())
    with pytest.warns(UserWarning, match="accepted next to nothing"):
        mcmc.run(random.key(0), Y)
        jax.block_until_ready(mcmc.last_state)
    with pytest.warns(UserWarning, match="accepted next to nothing") as caught:
        batch_report(mcmc)
    assert lines(caught) == {"batch_report(mcmc)"}
    with pytest.warns(UserWarning, match="raised to 1/T") as caught:
        to_arviz(mcmc)
    assert lines(caught) == {"to_arviz(mcmc)"}


def rare_columns():
    """Logistic regression on columns that hold but three ones among all rows."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(50_000, 7)).astype(np.float32)
    x[:, 3:] = 0
    for column in range(3, 7):
        x[column * 7 + np.arange(3), column] = 1
    return x, rng.binomial(1, 1 / (1 + np.exp(-x[:, 0]))).astype(np.float32)


def logistic(x, y, subsample_size):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("N", len(x), subsample_size=subsample_size):
        xb, yb = numpyro.subsample(x, 1), numpyro.subsample(y, 0)
        numpyro.sample("y", dist.Bernoulli(logits=xb @ w), obs=yb)


@pytest.mark.filterwarnings("error:MHBT")
def test_batches_as_large_as_an_expansion_asks_for_are_enough():
    data = rare_columns()
    kernel = MHBT(logistic, control_variate=Taylor(order=2, exact_rows=0))
    with pytest.warns(UserWarning, match="misses is too large at T = 1:") as caught:
        kernel.init(random.key(0), 0, None, (*data, 1000))
    text = str(caught[0].message)
    assert "Taylor(order=0)" not in text  # whose T > 1 leads back here
    needed = int(re.search(r"Raise `subsample_size` to about (\d+)\.", text)[1])
    assert needed < 25_000
    kernel.init(random.key(0), 0, None, (*data, needed))


def test_no_batch_is_enough_for_some_expansions():
    settings = MHBT(mean, control_variate=Taylor(order=2))._settings
    text = advice.nearer(settings, (Plate("N", 1000, 100),), 1.0, 50.0, 1e6)
    assert "Raise" not in text
    assert "`temper_prior=False` finds the T > 1" in text


@pytest.mark.parametrize("order", [None, 0, 1, 2])
@pytest.mark.parametrize("given", [{}, {"temperature": 50.0}, {"c_n": 4.0}])
def test_what_a_user_has_is_not_advised(order, given):
    control = None if order is None else Taylor(order)
    settings = MHBT(mean, control_variate=control, **given)._settings
    plates = (Plate("N", ROWS, BATCH),)
    said = [advice.colder(settings), advice.quieter(settings, 50.0)]
    if order:
        said.append(advice.nearer(settings, plates, 50.0, 9.0, 2.0))
        # An expansion is the worse the wider the posterior is made.
        assert not re.search("raise `temperature`", " ".join(said))
        for name in given:
            assert f"leave out `{name}`" in said[-1]
    assert f"Taylor(order={order})" not in " ".join(said)


def test_heat_under_an_expansion_is_told_by_its_name():
    kernel = MHBT(mean, control_variate=Taylor(order=2), temperature=2.0)
    mcmc = make_mcmc(kernel, num_samples=500)
    mcmc.run(random.key(0), Y)
    with pytest.warns(UserWarning, match="raised to 1/T, T = 2,") as caught:
        to_arviz(mcmc)
    text = str(caught[0].message)
    assert text.endswith("see `untemper`, or leave out `temperature`.")
    assert "leave out `temperature` to reach T = 1." in batch_report(mcmc).verdict


def test_chosen_temperature_that_is_too_hot_is_told(monkeypatch):
    """Batches of 20 rows and one parameter allow T = 10."""
    monkeypatch.setattr(prepare, "_coldest", lambda *_: (200.0, True))
    mcmc = make_mcmc(MHBT(mean), num_warmup=500)
    with pytest.warns(UserWarning, match="T = 200, .* hotter than") as caught:
        mcmc.run(random.key(0), Y)
        jax.block_until_ready(mcmc.last_state)
    enough = float(re.search(r"`temperature=(.*?)`", str(caught[0].message))[1])
    assert 10 < enough < 50


@pytest.mark.filterwarnings("error:MHBT")
def test_heat_that_was_asked_for_is_not_told():
    mcmc = make_mcmc(MHBT(mean, temperature=100.0), num_warmup=500)
    mcmc.run(random.key(0), Y)
    jax.block_until_ready(mcmc.last_state)
