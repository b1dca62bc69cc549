"""
A small run for tests that kill its process.

``python tests/killable.py OUT [PATH]`` draws, with checkpoints in PATH if given, and
saves the draws to OUT.
"""

import sys

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC

from numpyro_mhbt import MHBT, Checkpoint

FIELDS = ("accept_prob", "potential_energy")
Y = np.random.default_rng(0).normal(0.5, 1.0, 500).astype(np.float32)


def model(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    sd = numpyro.sample("sd", dist.Uniform(0.5, 2))
    numpyro.deterministic("ratio", mu / sd)
    with numpyro.plate("N", len(y), subsample_size=40):
        numpyro.sample("y", dist.Normal(mu, sd), obs=numpyro.subsample(y, 0))


def main(out, path=None):
    mcmc = MCMC(
        MHBT(model, c_n=20),
        num_warmup=1000,
        num_samples=3001,
        thinning=3,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    args = random.PRNGKey(3), jnp.asarray(Y)
    if path is None:
        mcmc.run(*args, extra_fields=FIELDS)
    else:
        Checkpoint(path, every=20).run(mcmc, *args, extra_fields=FIELDS)
    found = {**mcmc.get_samples(True), **mcmc.get_extra_fields(True)}
    state = jax.tree.leaves(mcmc.last_state)
    np.savez(out, **found, **{f"state{i}": leaf for i, leaf in enumerate(state)})


if __name__ == "__main__":
    main(*sys.argv[1:])
