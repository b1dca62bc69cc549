"""The paper's rule for β."""

from functools import partial

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC
import pytest

from numpyro_mhbt import MHBT, RSGLD, BetaSchedule
from numpyro_mhbt.beta import first_beta, forward_acceptance, next_beta
from numpyro_mhbt.plates import draw_batch, next_batch
from numpyro_mhbt.proposals import Knobs
from numpyro_mhbt.setup import read
from numpyro_mhbt.step import Walk, step
from numpyro_mhbt.target import make_evaluate

N, M, DIM = 600, 20, 3


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 10).expand([DIM]).to_event(1))
    with numpyro.plate("N", N, subsample_size=M) as rows:
        numpyro.sample("y", dist.Normal(mu, 1).to_event(1), obs=y[rows])


Y = 1 + random.normal(random.key(0), (N, DIM))


def above(limit):
    """Acceptance rates of moves that are always accepted above a β, and never below."""
    return lambda betas: jnp.where(betas > limit, 1.0, 0.0)


@pytest.mark.parametrize(
    ("accepted", "limit", "expected"),
    [
        (0.5, 10.0, 9.6),  # 16, 15.2, ..., 10.4 are above, 9.6 is not
        (0.5, 1.0, 8.0),  # at most by half
        (0.5, 20.0, 16.0),  # forward moves are not accepted as it is
        (0.3, 1.0, 16.0),
        (0.1, 1.0, 16.8),
    ],
)
def test_next_beta(accepted, limit, expected):
    beta = next_beta(BetaSchedule(), jnp.array(16.0), jnp.array(accepted), above(limit))
    assert float(beta) == pytest.approx(expected)


def test_beta_stays_at_least_one():
    beta = next_beta(BetaSchedule(), jnp.array(1.02), jnp.array(0.9), above(0.0))
    assert float(beta) == 1


def test_first_beta():
    assert float(first_beta(BetaSchedule(), above(90.0))) == pytest.approx(1000)
    # A wide one may be as bad as a narrow one.
    some = first_beta(BetaSchedule(), lambda b: above(90.0)(b) - above(600.0)(b))
    assert float(some) == pytest.approx(501, abs=1)
    # Never often enough: where it is most often.
    rising = first_beta(BetaSchedule(), lambda betas: 0.1 * jnp.tanh(betas / 1e5))
    assert float(rising) == pytest.approx(1e4)


@pytest.mark.parametrize("hastings", ["exact", "paper"])
def test_probes_are_accepted_as_often_as_forward_moves(hastings):
    proposal = RSGLD(0.05, forward_prob=0.5, hastings=hastings)
    data, _ = read(model, (Y,), {})
    evaluate = make_evaluate(
        model,
        data,
        lambda z: {"mu": z},
        jnp.array(N / 5),
        None,
        bias_correction=False,
        temper_prior=True,
        gradient=True,
    )
    point = evaluate(jnp.full(DIM, 0.2), draw_batch(random.key(1), data.plates))
    walk = Walk(
        partial(next_batch, plates=data.plates, num_blocks=1),
        evaluate,
        proposal,
        Knobs(jnp.array(0.05), jnp.array(1.0), jnp.array(5.0), float(N)),
        jnp.ones(DIM),
    )
    betas, num = jnp.array([1.0, 1.5, 3.0]), 4000
    probed = forward_acceptance(random.key(2), point, walk, num, betas)

    @partial(jax.vmap, in_axes=(0, None))
    def move(key, beta):
        at = walk._replace(knobs=walk.knobs._replace(beta=beta))
        info = step(key, point, at, refresh=False, pair=jnp.array(False))[1]
        return info.accept_prob, info.forward

    for rate, beta in zip(probed, betas, strict=True):
        probs, forward = jax.jit(move)(random.split(random.key(3), 2 * num), beta)
        seen = np.asarray(probs)[np.asarray(forward) == 1]
        error = seen.std() * np.sqrt(1 / len(seen) + 1 / num)
        assert abs(seen.mean() - rate) < 4 * error


@pytest.mark.filterwarnings("ignore:MHBT")
@pytest.mark.parametrize("steps_per_draw", [1, 5])
def test_beta_moves_once_an_epoch(steps_per_draw):
    eager = BetaSchedule(accept_high=0.05, probe_accept=0.1)
    proposal = RSGLD(
        1e-3, 50.0, hastings="paper", beta_schedule=eager, forward_prob=0.5
    )
    kernel = MHBT(
        model,
        proposal,
        c_n=5,
        control_variate=None,
        on_reject="refresh",
        steps_per_draw=steps_per_draw,
        adapt_step_size=False,
    )
    mcmc = MCMC(kernel, num_warmup=0, num_samples=180, progress_bar=False)
    mcmc.run(random.key(0), Y, extra_fields=("beta",))
    beta = np.asarray(mcmc.get_extra_fields()["beta"])
    epoch = N // M // steps_per_draw
    moved = 1 + np.flatnonzero(np.diff(beta))
    assert len(moved) > 2
    assert np.all((moved + 1) % epoch == 0)
    assert beta[-1] < 25


@pytest.mark.filterwarnings("ignore:MHBT")
@pytest.mark.parametrize("chains", [1, 3])
def test_a_rejected_move_is_followed_by_a_look(chains):
    """With ``refresh`` the next step takes the next batch and stays where it is."""
    kernel = MHBT(
        model,
        RSGLD(0.5, 2.0, forward_prob=0.5),
        c_n=5,
        control_variate=None,
        on_reject="refresh",
        adapt_step_size=False,
    )
    mcmc = MCMC(
        kernel,
        num_warmup=0,
        num_samples=400,
        num_chains=chains,
        chain_method="vectorized",
        progress_bar=False,
    )
    names = ("accepted", "accept_prob", "forward", "batch", "log_density")
    mcmc.run(random.key(0), Y, extra_fields=names)
    found = mcmc.get_extra_fields(group_by_chain=True)
    z = np.asarray(mcmc.get_samples(group_by_chain=True)["mu"])
    accepted, looks = np.asarray(found["accepted"]), np.asarray(found["forward"]) < 0
    rejected = (accepted == 0) & ~looks
    assert 0.1 < rejected.mean() < 0.45
    assert np.array_equal(rejected[:, :-1], looks[:, 1:])
    stays = np.all(z[:, 1:] == z[:, :-1], axis=-1)
    assert np.array_equal(stays, accepted[:, 1:] == 0)
    rows = np.asarray(found["batch"]["N"])
    same_rows = np.all(rows[:, 1:] == rows[:, :-1], axis=-1)
    assert np.array_equal(same_rows, rejected[:, 1:])
    assert np.all(np.asarray(found["accept_prob"])[looks] == 0)
    # Steps tell moves: a rejected one takes two.
    share = accepted.mean()
    assert 2 * share / (1 + share) == pytest.approx(
        accepted.sum() / np.sum(~looks), abs=1 / 200
    )
    # What is known of a point after a look is its density on the new batch.
    state = kernel.refresh(mcmc.last_state, (Y,), {})
    known = np.isfinite(found["log_density"][:, -1])
    assert np.array_equal(known, ~rejected[:, -1])
    assert np.asarray(state.log_density).ravel()[known] == pytest.approx(
        np.asarray(mcmc.last_state.log_density).ravel()[known], rel=1e-5
    )


def test_first_beta_is_found_where_the_chain_starts():
    """Far out, long steps against a small noise need a wide way back."""
    plan = BetaSchedule()
    proposal = RSGLD(0.5, noise="paper", hastings="paper", beta_schedule=plan)
    kernel = MHBT(model, proposal, c_n=5, control_variate=None)
    far = {"mu": jnp.full(DIM, 5.0)}
    state = kernel.init(random.key(0), 0, far, (Y,), {})
    assert float(state.beta) > 10
    assert float(MHBT(model, c_n=5).init(random.key(0), 0, None, (Y,), {}).beta) == 1


def test_bad_schedules_are_refused():
    for wrong in (
        {"accept_high": 1.5},
        {"change": 0.0},
        {"num_probes": 0},
        {"steps_per_epoch": 0},
    ):
        (name,) = wrong
        with pytest.raises(ValueError, match=f"BetaSchedule: {name} must be"):
            BetaSchedule(**wrong)
