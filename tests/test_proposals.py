"""Proposal densities against densities computed another way."""

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from numpyro_mhbt import RSGLD, SGLD, RandomWalk
from numpyro_mhbt.proposals import Knobs

N, C_N = 500.0, 20.0


def knobs(proposal, dtype=jnp.float64):
    return Knobs(jnp.asarray(proposal.step_size, dtype), proposal.beta, C_N, N)


def noise_scale(proposal):
    eps = proposal.step_size
    return {
        "matched": np.sqrt(eps * (2 - eps) / C_N),
        "tempered": np.sqrt(2 * eps / C_N),
        "paper": np.sqrt(2 * eps) / N,
    }[proposal.noise]


def log_q(proposal, displacement, grad):
    """The mixture of the paper's equation for q_I, from scipy, term by term."""
    eps, beta, p = proposal.step_size, proposal.beta, proposal.forward_prob
    s = noise_scale(proposal)
    drift = eps * grad / C_N
    forward = stats.norm.logpdf(displacement, drift, s).sum()
    backward = stats.norm.logpdf(displacement, -drift, s * beta).sum()
    if proposal.hastings == "paper":
        backward += displacement.size * np.log(beta)
    with np.errstate(divide="ignore"):
        weights = np.log([p, 1 - p])
    return special.logsumexp(weights + np.array([forward, backward]))


PROPOSALS = [
    RSGLD(step_size, beta, forward_prob=p, noise=noise, hastings=hastings)
    for step_size in (1e-3, 0.5)
    for beta in (1.0, 1.5, 3.0)
    for p in (0.5, 0.8)
    for noise in ("matched", "tempered", "paper")
    for hastings in ("exact", "paper")
] + [SGLD(1e-3), SGLD(0.5, noise="paper")]


@pytest.mark.parametrize("dim", [1, 10, 1000])
def test_log_ratio_is_that_of_the_mixture(dim):
    with jax.enable_x64(True):
        for k, proposal in enumerate(PROPOSALS):
            for scale in (0.1, 3.0):
                keys = random.split(random.key(k), 3)
                grad = scale * random.normal(keys[0], (dim,))
                new_grad = grad + 0.1 * scale * random.normal(keys[1], (dim,))
                move = proposal.draw(keys[2], grad, knobs(proposal))
                ours = proposal.log_ratio(move, grad, new_grad, knobs(proposal))
                there = np.asarray(proposal.displacement(move, grad, knobs(proposal)))
                expected = log_q(proposal, -there, np.asarray(new_grad)) - log_q(
                    proposal, there, np.asarray(grad)
                )
                assert float(ours) == pytest.approx(expected, rel=1e-8, abs=1e-6)


@pytest.mark.parametrize(
    "proposal", [RandomWalk(0.3), SGLD(0.5), RSGLD(0.5, 3.0, forward_prob=0.8)]
)
def test_moves_follow_the_density(proposal):
    """Kolmogorov-Smirnov of many draws in one dimension against the mixture."""
    grad = jnp.array([4.0])
    keys = random.split(random.key(0), 20_000)
    at = knobs(proposal, jnp.float32)
    moves = jax.vmap(lambda key: proposal.draw(key, grad, at))(keys)
    there = jax.vmap(lambda move: proposal.displacement(move, grad, at))(moves)
    drift = proposal.step_size * 4.0 / C_N
    if isinstance(proposal, RandomWalk):
        parts = [(1.0, 0.0, proposal.step_size)]
    else:
        p, s = proposal.forward_prob, noise_scale(proposal)
        parts = [(p, drift, s), (1 - p, -drift, s * proposal.beta)]
        assert np.mean(moves.forward) == pytest.approx(p, abs=0.02)

    def cdf(x):
        return sum(w * stats.norm.cdf(x, mean, sd) for w, mean, sd in parts)

    assert stats.kstest(np.asarray(there[:, 0]), cdf).pvalue > 1e-3


@pytest.mark.parametrize("hastings", ["exact", "paper"])
@pytest.mark.parametrize("beta", [1.0, 1.01, 2.0, 30.0])
def test_single_precision_in_high_dimension(beta, hastings):
    """The weights of a 784-600-10 network: sums of 10^5 to 10^7, ratios near one."""
    dim = 477_010
    proposal = RSGLD(1e-3, beta, hastings=hastings)
    rng = np.random.default_rng(0)
    # A drift of several times the noise, and a ratio of order one all the same.
    grad = 1000 * rng.normal(size=dim)
    new_grad = -grad + 0.1 * rng.normal(size=dim)

    def ratio(dtype, key):
        g, new_g = jnp.asarray(grad, dtype), jnp.asarray(new_grad, dtype)
        move = proposal.draw(key, g, knobs(proposal, dtype))
        return proposal.log_ratio(move, g, new_g, knobs(proposal, dtype)), move

    for seed in range(4):
        single, move = jax.jit(lambda key: ratio(jnp.float32, key))(random.key(seed))
        with jax.enable_x64(True):
            move = jax.tree.map(
                lambda x: jnp.asarray(x, jnp.result_type(x, jnp.float64)), move
            )
            double = proposal.log_ratio(
                move, jnp.asarray(grad), jnp.asarray(new_grad), knobs(proposal)
            )
        assert abs(float(double)) < 100
        assert float(single) == pytest.approx(float(double), abs=0.005)


def test_random_walk_is_symmetric():
    proposal = RandomWalk(0.3)
    grad = jnp.ones(3)
    move = proposal.draw(random.key(0), grad, knobs(proposal, jnp.float32))
    assert proposal.log_ratio(move, grad, -grad, knobs(proposal, jnp.float32)) == 0
