"""Which knob to turn, in one place, so that no advice sends a user back to another."""

from __future__ import annotations

import math

from numpyro_mhbt.plates import Plate
from numpyro_mhbt.settings import Settings

COLD = 1.005
"""Below it T is as good as 1."""
FEWEST = 50
"""Draws that weights must leave, or `untemper` refuses."""
LOUD = 8.0
"""Times the noise aimed at, from which on there is too much of it."""
_LEFTOVER = 0.5  # error of a log-density that is small enough
_POWER = {-1: 2, 0: 1, 1: 0, 2: -1}  # of c_n that the noise variance grows with
_MOST = 0.5  # of all rows, above which a batch is hardly one
CAUSE = (
    "The usual cause is a parameter that few rows inform, or whose rows all have the "
    "same outcome: drop it, pool it, or give it a tighter prior."
)


def given(settings: Settings) -> str | None:
    """By which argument the user has set T, if at all."""
    names = (n for n in ("temperature", "c_n") if getattr(settings, n) is not None)
    return next(names, None)


def quieter(settings: Settings, temperature: float) -> str:
    """What lowers the noise: heat too, but not under an expansion, which it widens."""
    if settings.taylor_order < 1:
        return "Raise `subsample_size`, or lower `c_n` (raise `temperature`)."
    name = given(settings)
    if name is None or temperature < COLD:
        return "Raise `subsample_size`."
    return (
        f"Raise `subsample_size`, or leave out `{name}`: an expansion is best at T = 1."
    )


def colder(settings: Settings) -> str:
    """What leads to draws of the posterior itself."""
    name = given(settings)
    if settings.taylor_order < 2:
        unset = f" and without `{name}`" if name else ""
        return (
            f"sample with `Taylor(order=2)`{unset}, if many rows inform each "
            "parameter, and with batches as large as it asks for"
        )
    return f"leave out `{name}`" if name else "raise `subsample_size`"


def is_near(settings: Settings, variance: float, leftover: float) -> bool:
    """Whether an expansion misses little enough."""
    return variance <= LOUD * settings.target_noise and leftover <= _LEFTOVER


def nearer(
    settings: Settings,
    plates: tuple[Plate, ...],
    temperature: float,
    variance: float,
    leftover: float,
) -> str:
    """What helps an expansion that misses too much."""
    name = given(settings)
    if name is not None and temperature > COLD:
        return (
            f"An expansion is best at T = 1: leave out `{name}`. For draws at this T "
            "use `Taylor(order=0)`."
        )
    if len(plates) != 1:
        return f"Raise `subsample_size`. {CAUSE}"
    # The third cumulant, the slowest of what is left over, falls like m^-2.
    times = max(variance / settings.target_noise, math.sqrt(leftover / _LEFTOVER))
    needed = batch_size(plates[0], times)
    if needed < _MOST * plates[0].size:
        return f"Raise `subsample_size` to about {needed}. {CAUSE}"
    return (
        f"{CAUSE} As it is, no small batch is enough for T = 1. `Taylor(order=0)` "
        "with `temper_prior=False` finds the T > 1 that batches of this size allow."
    )


def reached(settings: Settings) -> str:
    """What helps where chains have left the reference of an expansion."""
    control = settings.control_variate
    if settings.taylor_order == 2 and control and control.ref_params is None:
        # That one is near the mode.
        return f"The posterior is far from Gaussian around its mode. {CAUSE}"
    return f"Give a better one as `Taylor({settings.taylor_order}, ref_params=...)`."


def batch_size(plate: Plate, times: float) -> int:
    """Rows that make the noise variance so many times smaller, to two digits."""
    _, n, m = plate
    if not math.isfinite(times):
        return n
    needed = 1 / ((1 / m - 1 / n) / times + 1 / n)
    unit = 10 ** max(math.floor(math.log10(needed)) - 1, 0)
    return min(n, math.ceil(needed / unit) * unit)


def allowed(settings: Settings, temperature: float, noise: float) -> float:
    """About the T at which this noise would be on target, if it depends on T so."""
    power = _POWER[settings.taylor_order]
    if power < 1 or not noise >= 0:
        return temperature
    return max(1.0, temperature * (noise / settings.target_noise) ** (1 / power))


def loudness_at_one(settings: Settings, temperature: float, noise: float) -> float:
    """By how many times the noise would exceed its target at T = 1."""
    power = max(_POWER[settings.taylor_order], 0)
    return noise * temperature**power / settings.target_noise


def too_hot(settings: Settings, temperature: float, noise: float) -> str | None:
    """
    Whether a T that was not asked for is several times what batches need.

    That happens where no Gaussian fits and chains are far from the reference. The T
    named is a first guess: it takes the noise to fall like T^-2, while the power was
    between 1.3 and 2.4 on small networks.
    """
    if given(settings) or settings.taylor_order > 0 or math.isnan(noise):
        return None
    enough = max(1.0, temperature * math.sqrt(noise / settings.target_noise))
    if temperature <= COLD or enough > temperature / 3:
        return None
    return (
        f"T = {temperature:.4g}, which was chosen before the first step, is hotter "
        f"than it need be: the noise variance is {noise:.2g} (about "
        f"{settings.target_noise:g} is good). If chains mix, try "
        f"`temperature={enough:.2g}`."
    )
