"""Warnings about runs that are not to be trusted."""

from __future__ import annotations

import warnings

import numpy as np

from numpyro_mhbt.adaptation import acceptance_ceiling

_STUCK = 0.005
_LOUD = 10.0


def warn_after_warmup(accept_prob: np.ndarray, noise_variance: np.ndarray) -> None:
    """
    Say what is wrong, if anything, when warm-up ends.

    A chain that never moves looks perfect to ArviZ (as many effective draws as draws,
    R-hat not a number), so it must be told here.

    :param accept_prob: mean acceptance rate of each chain in warm-up.
    :param noise_variance: noise variance of the estimate at the end of warm-up.
    """
    accept_prob = np.atleast_1d(accept_prob)
    noise = float(np.nanmedian(noise_variance))
    stuck = int(np.sum(~(accept_prob > _STUCK)))
    if noise > _LOUD:
        ceiling = float(acceptance_ceiling(noise))
        warnings.warn(
            f"MHBT: the noise variance of the mini-batch log-density is {noise:.3g} "
            f"(about 1 is good), so that at most {ceiling:.2g} of all moves can be "
            "accepted. Raise `subsample_size`, or lower `c_n` (raise `temperature`).",
            stacklevel=2,
        )
    elif stuck:
        warnings.warn(
            f"MHBT: {stuck} of {accept_prob.size} chain(s) accepted next to nothing in "
            f"warm-up (mean acceptance {accept_prob.min():.2g}). Lower the proposal's "
            "`step_size`, allow more warm-up, or start closer with `init_strategy`.",
            stacklevel=2,
        )
