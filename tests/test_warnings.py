"""A warning names the line of the user."""

from concurrent.futures import ThreadPoolExecutor
import linecache

import jax
from jax import random
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_mhbt import MHBT, RandomWalk, batch_report, to_arviz, watch

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
