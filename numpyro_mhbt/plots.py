"""
The few pictures of a run that ArviZ does not have.

Each function takes a finished run, draws on the axes given or else on new ones, and
returns them. Pictures of the draws alone also take what
:func:`~numpyro_mhbt.to_arviz` returns.

**Example**

.. doctest::

    >>> from jax import random
    >>> import matplotlib; matplotlib.use("Agg")
    >>> import numpyro, numpyro.distributions as dist
    >>> from numpyro.infer import MCMC
    >>> from numpyro_mhbt import MHBT, plots
    >>> def model(y):
    ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
    ...     with numpyro.plate("N", len(y), subsample_size=100):
    ...         numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))
    >>> y = 3 + random.normal(random.key(0), (1000,))
    >>> mcmc = MCMC(MHBT(model), num_warmup=100, num_samples=200, progress_bar=False)
    >>> mcmc.run(random.key(1), y, extra_fields=("noise_variance",))
    >>> plots.plot_noise(mcmc).get_ylabel()
    'noise variance of the log-density'
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpyro.infer import MCMC

from numpyro_mhbt.adaptation import acceptance_ceiling
from numpyro_mhbt.convert import finished, temperature_of
from numpyro_mhbt.draws import (
    SHOWN,
    count_moves,
    draws_of,
    place,
    scalars,
    spread,
    thinned,
    valley,
)
from numpyro_mhbt.posterior import data_and_latent, tempered_log_density

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MASSES = (0.99, 0.9, 0.5)
_BLOCKS, _BLOCK = 50, 50
_SOME = 20  # coordinates
_VALLEY = 0.8  # of the height of the lower mode
_DRAW = "draw, counted from the start of warm-up"


def plot_contours(
    mcmc: MCMC,
    var_names: Sequence[str] | None = None,
    *,
    grid_size: int = 50,
    ax: Axes | None = None,
) -> Axes:
    """
    Draws of two coordinates over the tempered posterior of all rows.

    Contours bound the regions of highest density that hold 50, 90 and 99% of the mass.
    With more than two coordinates they are those of a cut through the posterior, where
    the others are at the mean of their draws.

    :param mcmc: finished run.
    :param var_names: two coordinates of latent sites, such as ``["a", "w[0]"]``.
        ``None``: the first two.
    :param int grid_size: points along each axis; the log-density of all rows is
        computed at each pair.
    """
    settings, state = finished(mcmc, "plot_contours")
    data, latent = data_and_latent(mcmc, settings, state)
    two = scalars({k: v[None] for k, v in latent.items()}, var_names, 2)
    if len(two) != 2:
        raise ValueError(f"plot_contours needs two coordinates, got {list(two)}.")
    x, y = (_grid(draws, grid_size) for draws in two.values())
    at = {k: np.repeat(v.mean(0)[None], grid_size**2, 0) for k, v in latent.items()}
    for name, values in zip(two, np.meshgrid(x, y), strict=True):
        site, index = place(name)
        at[site][(..., *index)] = values.ravel()
    heat = temperature_of(state)
    density = tempered_log_density(settings, data, at, heat, "Contours")
    if np.isnan(density).mean() > 0.9:
        raise ValueError(f"{list(two)} cannot vary while other coordinates stay.")

    ax = _new(ax)
    some = [thinned(draws.ravel()) for draws in two.values()]
    ax.plot(*some, "o", ms=2, alpha=0.3, mew=0, label="draws")
    density = np.ma.masked_invalid(density.reshape(grid_size, grid_size))
    levels = _levels(density.compressed())
    style: dict[str, Any] = {"colors": "black", "linewidths": 1, "linestyles": "solid"}
    lines = ax.contour(x, y, density, levels, **style)
    names = (f"{100 * mass:g}%" for mass in _MASSES)
    ax.clabel(lines, fmt=dict(zip(levels, names, strict=True)), fontsize=8)
    others = sum(v[0].size for v in latent.values()) - 2
    label = f"50, 90, 99% of the posterior of all rows at T = {heat:.4g}"
    label += f"\n({others} other coordinates at their mean)" if others else ""
    ax.plot([], [], "k-", lw=1, label=label)
    ax.set(**dict(zip(("xlabel", "ylabel"), two, strict=True)))
    return _with_legend(ax)


def plot_modes(
    data: Any,
    var_name: str | None = None,
    *,
    split: float | None = None,
    ax: Axes | None = None,
) -> Axes:
    """
    Which of two modes the chains are in, how often they move and how long they stay.

    A move counts when a chain has gone more than half way from the split to the middle
    (the median) of the other mode, so that lingering in between is none.

    :param data: finished run, or ArviZ object.
    :param var_name: coordinate, such as ``"w[0]"``. ``None``: of the first 20 the one
        with the deepest valley between two modes.
    :param float split: value between the modes. ``None``: where the density of the
        draws is lowest between them.
    """
    names = None if var_name is None else [var_name]
    some = scalars(draws_of(data), names, _SOME)
    valleys = {name: valley(draws) for name, draws in some.items()}
    name = min(valleys, key=lambda name: valleys[name][1])
    draws, (lowest, height) = some[name], valleys[name]
    if split is None and height < _VALLEY:
        split = lowest
    ax = _new(ax)
    num_chains, num_draws = draws.shape
    shown = thinned(np.arange(draws.size), 4 * SHOWN)
    sides = {"all draws": np.ones(draws.size, bool)}
    title = "one mode seen"
    if split is not None:
        above = draws.ravel() > split
        sides = {f"above {split:.3g}": above, f"below {split:.3g}": ~above}
        title = f"{count_moves(draws, split)} moves between modes"
        ax.axhline(split, color="black", ls="--", lw=1)
    for label, side in sides.items():
        here = shown[side[shown]]
        label += f": {100 * side.mean():.0f}% of the draws" if split is not None else ""
        ax.plot(here, draws.ravel()[here], "o", ms=2, mew=0, alpha=0.6, label=label)
    for chain in range(1, num_chains):
        ax.axvline(chain * num_draws, color="0.5", lw=0.8)
    after = ", chain after chain" if num_chains > 1 else ""
    ax.set(xlabel=f"draw{after}", ylabel=name)
    return _with_legend(ax, title)


def plot_acceptance(mcmc: MCMC, *, ax: Axes | None = None) -> Axes:
    r"""
    Acceptance rate in the course of a run, below its ceiling.

    Noise of variance v lets through at most a share of :math:`2 \Phi(-\sqrt{v / 2})`
    of all moves. Forward and backward moves of :class:`~numpyro_mhbt.RSGLD` are shown
    apart, unless ``steps_per_draw`` has mixed them.

    :param mcmc: finished run with the extra fields ``accept_prob``,
        ``mean_noise_variance`` and, with one step per draw, ``forward``.
    """
    settings, _ = finished(mcmc, "plot_acceptance")
    apart = settings.steps_per_draw == 1
    names = ["accept_prob", "mean_noise_variance"] + ["forward"] * apart
    accept, noise, *forward = _fields(mcmc, *names)
    kinds = {"all moves": np.ones(accept.shape, bool)}
    if apart and forward[0].min() != forward[0].max():
        kinds = {"forward": forward[0] == 1, "backward": forward[0] == 0}
    i = _numbers(mcmc, accept)
    ax = _new(ax)
    for kind, mask in kinds.items():
        ax.plot(*_course(i[mask], accept[mask], np.mean), "o-", ms=3, label=kind)
    # Only one block of the batch differs from the last.
    ceiling = acceptance_ceiling(np.median(noise, axis=0) / settings.num_blocks)
    ax.plot(i[0], ceiling, "k--", lw=1, label="ceiling that noise sets")
    ax.set(ylim=(0, 1), xlabel=_DRAW, ylabel="acceptance rate")
    return _with_legend(ax)


def plot_noise(mcmc: MCMC, *, ax: Axes | None = None) -> Axes:
    """
    Noise variance of the mini-batch log-density in the course of a run.

    :param mcmc: finished run with the extra field ``noise_variance``, and
        ``mean_noise_variance`` if the mean on fresh batches is to be shown, too: chains
        linger on batches that flatter them.
    """
    settings, _ = finished(mcmc, "plot_noise")
    (noise,) = _fields(mcmc, "noise_variance")
    if not np.isfinite(noise).any():
        raise ValueError("A batch of one row does not show its noise variance.")
    i = _numbers(mcmc, noise)
    ax = _new(ax)
    some = (thinned(x.T.ravel()) for x in (i, noise))
    ax.plot(*some, "o", ms=2, mew=0, alpha=0.25, label="draws")
    ax.plot(*_course(i, noise, np.median), label="their running median")
    fresh = mcmc.get_extra_fields(group_by_chain=True).get("mean_noise_variance")
    if fresh is not None:
        ax.plot(i[0], np.median(fresh, axis=0), label="mean so far, on fresh batches")
    target = settings.target_noise
    ax.axhline(target, color="black", ls="--", lw=1, label=f"target {target:g}")
    scale = "log" if (noise > 0).all() else "linear"
    ax.set(xlabel=_DRAW, ylabel="noise variance of the log-density", yscale=scale)
    return _with_legend(ax)


def plot_tuning(mcmc: MCMC, *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """
    Step size and β of each chain in the course of a run.

    They move in warm-up, which is shown after ``mcmc.warmup(..., collect_warmup=True)``
    and before ``mcmc.run``, or by schedules.

    :param mcmc: finished run with the extra fields ``step_size`` and ``beta``.
    :param axes: two.
    """
    finished(mcmc, "plot_tuning")
    values = _fields(mcmc, "step_size", "beta")
    axes = _new(axes, 2)
    i = _numbers(mcmc, values[0])
    for ax, value, name in zip(axes, values, ("step size", "β"), strict=True):
        ax.plot(i.T, value.T, lw=1, label=[f"chain {c}" for c in range(len(value))])
        wide = value.max() > 10 * value.min() > 0
        ax.set(ylabel=name, yscale="log" if wide else "linear")
    axes[-1].set_xlabel(_DRAW)
    if len(i) <= 10:
        _with_legend(axes[0])
    return np.asarray(axes)


def plot_temperatures(
    runs: Sequence[Any],
    var_names: Sequence[str] | None = None,
    *,
    ax: Axes | None = None,
) -> Axes:
    """
    How the spread of draws grows with temperature, beside the line of sqrt(T).

    A Gaussian posterior follows the line. Draws that spread faster find other modes or
    heavier tails, and shrinking them by 1/sqrt(T) does not lead to the posterior.

    :param runs: finished runs of one model at different temperatures, or ArviZ objects
        made of them by :func:`~numpyro_mhbt.to_arviz`.
    :param var_names: coordinates or sites. ``None``: the first 5 coordinates.
    """
    runs = sorted(runs, key=_temperature)
    heat = np.array([_temperature(run) for run in runs])
    if len(set(heat)) < 2:
        raise ValueError(f"plot_temperatures needs two temperatures, got {heat}.")
    spreads: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for name, draws in scalars(draws_of(run), var_names, 5).items():
            spreads.setdefault(name, []).append(spread(draws))
    ax = _new(ax)
    for name, found in spreads.items():
        sd, relative = np.array(found).T
        ratio = sd / sd[0]
        error = 2 * ratio * np.hypot(relative, relative[0])
        error[0] = 0  # by definition
        ax.errorbar(heat, ratio, error, fmt="o-", ms=4, lw=1, capsize=2, label=name)
    line = np.geomspace(heat[0], heat[-1], 50)
    ax.plot(line, np.sqrt(line / heat[0]), "k--", lw=1, label="sqrt(T)")
    ax.set(
        xscale="log",
        yscale="log",
        xlabel="temperature T",
        ylabel=f"spread over that at T = {heat[0]:.4g}, ± 2 errors",
    )
    ax.set_xticks(heat, [f"{t:.4g}" for t in heat])
    ax.set_xticks([], minor=True)
    for ticks in ax.yaxis.set_major_formatter, ax.yaxis.set_minor_formatter:
        ticks("{x:g}")
    return _with_legend(ax)


def _new(axes: Any, rows: int = 1) -> Any:
    """The axes given, or else new ones."""
    if axes is not None:
        return axes
    import matplotlib.pyplot as plt

    return plt.subplots(rows, sharex=True, layout="constrained")[1]


def _with_legend(ax: Axes, title: str | None = None) -> Axes:
    """Above, where it hides nothing."""
    ax.legend(
        title=title,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=2,
        fontsize=8,
        markerscale=2,
        frameon=False,
    )
    return ax


def _fields(mcmc: MCMC, *names: str) -> list[np.ndarray]:
    """Of each draw, by chain."""
    found = mcmc.get_extra_fields(group_by_chain=True)
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(
            f"The run did not collect {missing}. Ask for them: "
            f"`mcmc.run(..., extra_fields={names})`."
        )
    return [np.asarray(found[name], float) for name in names]


def _numbers(mcmc: MCMC, values: np.ndarray) -> np.ndarray:
    """Of each draw, counted from the start of warm-up."""
    last = int(np.ravel(mcmc.last_state.i)[0])
    i = last - mcmc.thinning * np.arange(values.shape[1])[::-1]
    return np.broadcast_to(i, values.shape)


def _course(i: np.ndarray, values: np.ndarray, average: Callable) -> np.ndarray:
    """Averages over blocks of equally many values of all chains, and where they are."""
    order = np.argsort(i, axis=None, kind="stable")
    count = max(1, min(_BLOCKS, i.size // _BLOCK))
    blocks = np.array_split(order, count)
    pairs = [(i.ravel()[b].mean(), average(values.ravel()[b])) for b in blocks]
    return np.transpose(pairs)


def _temperature(data: Any) -> float:
    if isinstance(data, MCMC):
        return temperature_of(finished(data, "plot_temperatures")[1])
    if "temperature" not in data["posterior"].attrs:
        raise ValueError("The posterior has no temperature: make it by `to_arviz`.")
    return float(data["posterior"].attrs["temperature"])


def _grid(draws: np.ndarray, size: int) -> np.ndarray:
    low, high = np.quantile(draws, [0.001, 0.999])
    margin = 0.15 * (high - low)
    return np.linspace(low - margin, high + margin, size)


def _levels(log_density: np.ndarray) -> list[float]:
    """Heights that bound the regions of highest density, rising."""
    ranked = np.sort(log_density)[::-1]
    mass = np.cumsum(np.exp(ranked - ranked[0]))
    return [ranked[np.searchsorted(mass, share * mass[-1])] for share in _MASSES]
