"""Many short chains, and scores against exact moments in units of Monte Carlo error."""

import warnings

from jax import random
import numpy as np
from numpyro.infer import MCMC


def run_chains(kernel, *args, num_chains=512, burn=300, draws=500, seed=0, **kwargs):
    """Draws by site with a leading axis of chains; nothing is adapted unless asked."""
    init_params = kwargs.pop("init_params", None)
    jit_model_args = kwargs.pop("jit_model_args", False)
    mcmc = MCMC(
        kernel,
        num_warmup=burn,
        num_samples=draws,
        num_chains=num_chains,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=jit_model_args,
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "MHBT: ")
        mcmc.run(random.key(seed), *args, init_params=init_params, **kwargs)
    samples = mcmc.get_samples(group_by_chain=True)
    return {k: np.asarray(v, np.float64) for k, v in samples.items()}


def z_score(values, exact):
    """Distance of the mean from ``exact``, in standard errors over the chains."""
    means = values.mean(axis=1)
    error = means.std(axis=0, ddof=1) / np.sqrt(len(means))
    return (means.mean(axis=0) - exact) / error


def assert_moments(values, mean, variance, bound=4.0, slack=0.0):
    """
    Mean and variance agree at the level of Monte Carlo error.

    :param slack: known relative error of the variance that is not Monte Carlo error.
    """
    assert np.all(np.abs(z_score(values, mean)) < bound)
    squares = (values - mean) ** 2
    assert np.all(z_score(squares, variance * (1 - slack)) > -bound)
    assert np.all(z_score(squares, variance * (1 + slack)) < bound)
