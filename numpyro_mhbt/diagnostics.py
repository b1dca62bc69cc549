"""Warnings about runs that are not to be trusted."""

from __future__ import annotations

import warnings

import jax
import numpy as np
from numpyro.util import not_jax_tracer

from numpyro_mhbt.adaptation import acceptance_ceiling
from numpyro_mhbt.target import Data

_STUCK = 0.005
_LOUD = 10.0
_LARGE = 2**28


def hint_large_constants(data: Data) -> None:
    """Say how to keep large data out of the program that NumPyro compiles."""
    leaves = jax.tree.leaves((data.args, data.kwargs))
    size = sum(
        x.nbytes for x in leaves if isinstance(x, jax.Array) and not_jax_tracer(x)
    )
    if size > _LARGE:
        warnings.warn(
            f"MHBT: {size / 2**20:.0f} MiB of data are compiled into the program as "
            "constants, which takes time and copies them. "
            "`MCMC(..., jit_model_args=True)` passes them as arguments instead.",
            stacklevel=2,
        )


def warn_after_warmup(
    now: np.ndarray, accept_prob: np.ndarray, noise_variance: np.ndarray
) -> None:
    """
    Say what is wrong, if anything, when warm-up ends.

    A chain that never moves looks perfect to ArviZ (as many effective draws as draws,
    R-hat not a number), so it must be told here.

    :param now: whether warm-up ends just now; a branch that was mapped over chains
        cannot keep others from coming here.
    :param accept_prob: mean acceptance rate of each chain in warm-up.
    :param noise_variance: of the log-density on fresh batches, by chain.
    """
    if not np.all(now):
        return
    accept_prob, noise = np.atleast_1d(accept_prob), np.median(noise_variance)
    stuck = int(np.sum(~(accept_prob > _STUCK)))
    if noise > _LOUD:
        warnings.warn(
            f"MHBT: the noise variance of the mini-batch log-density is {noise:.3g} "
            "(about 1 is good), so that at most a share of "
            f"{acceptance_ceiling(noise):.1g} of all moves can be accepted. Raise "
            "`subsample_size`, or lower `c_n` (raise `temperature`).",
            stacklevel=2,
        )
    elif stuck:
        warnings.warn(
            f"MHBT: {stuck} of {accept_prob.size} chain(s) accepted next to nothing in "
            f"warm-up (mean acceptance {accept_prob.min():.2g}). Lower the proposal's "
            "`step_size`, allow more warm-up, or start closer with `init_strategy`.",
            stacklevel=2,
        )
