"""The pictures of ``suite.py``, made of its tables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib.lines import Line2D
import matplotlib.pyplot as plt
import numpy as np

MEAN_CLOSE, SD_CLOSE = 0.1, 0.1
Row = dict[str, Any]


def close(errors: tuple[float, float]) -> bool:
    return errors[0] < 3 * MEAN_CLOSE and errors[1] < SD_CLOSE


def plot_speed(rows: list[Row], path: Path) -> None:
    names = list(dict.fromkeys(f"{r['problem']}\nn = {r['n']:,}" for r in rows))
    families = list(dict.fromkeys(r["sampler"] for r in rows))
    figure, axes = plt.subplots(figsize=(6.5, 1.2 + 0.7 * len(names)))
    for r in rows:
        if r["ESS/s"] > 0:
            place = families.index(r["sampler"])
            y = names.index(f"{r['problem']}\nn = {r['n']:,}")
            good = close((r["mean error, sd"], r["sd error"]))
            axes.semilogx(
                r["ESS/s"],
                y + 0.7 * (place / max(len(families) - 1, 1) - 0.5),
                "os^vDPX*"[place % 8],
                color=f"C{place}",
                mfc=f"C{place}" if good else "none",
            )
    handles = [
        Line2D([], [], ls="", marker="os^vDPX*"[i % 8], color=f"C{i}", label=name)
        for i, name in enumerate(families)
    ]
    handles.append(
        Line2D(
            [],
            [],
            ls="",
            marker="o",
            color="k",
            mfc="none",
            label="hollow: errors too large",
        )
    )
    axes.legend(handles=handles, ncol=3, loc="upper right", bbox_to_anchor=(1, -0.1))
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    for y in np.arange(len(names) - 1) + 0.5:
        axes.axhline(y, color="0.85", lw=0.8)
    axes.set(xlabel="effective samples per second")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def plot_growth(steps: list[Row], chains: list[Row], path: Path) -> None:
    """A step as n grows, and a draw as chains are added."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4))
    steps = [row for row in steps if row["type"] == "float32"]
    systems = {
        "bare step, rows by randint": ("k--", None),
        "bare step, our rows": ("k:", "bare, our rows"),
        "MHBT, no control variate": ("o-", "RSGLD, no control variate"),
        "MHBT, order 0": ("s-", "RSGLD, order 0"),
        "MHBT, order 2": ("^-", "RSGLD, order 2"),
    }
    for label, (style, column) in systems.items():
        times = [row["bare step, µs"] * (row[column] if column else 1) for row in steps]
        left.semilogx([row["n"] for row in steps], times, style, label=label)
    left.set(xlabel="rows n", ylabel="µs a step", title="a step, m = 1000")
    left.set_ylim(0)
    counts = np.array([row["chains"] for row in chains])
    kinds = {
        "MHBT, own batches": ("o-", "MHBT"),
        "MHBT, shared batches": ("s-", "MHBT, shared batches"),
        "bare gradients, own batches": ("k--", "gradient, own batch"),
        "bare gradients, one batch": ("k:", "one batch"),
    }
    for label, (style, column) in kinds.items():
        times = [row[f"{column}, times one"] for row in chains]
        right.loglog(counts, times, style, label=label)
    right.loglog(counts, counts, color="0.8", lw=5, zorder=0, label="one after another")
    right.set(xlabel="vectorised chains", ylabel="in units of one chain")
    right.set_title("a draw of all chains, m = 1000, n = 10⁵")
    right.set_xticks(counts, counts)
    right.minorticks_off()
    for axis in left, right:
        axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)
