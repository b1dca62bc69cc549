"""
Where the time of a draw of k vectorised chains goes, operation by operation.

The logistic regression of ``step_cost.py``, control variate of order 0. JAX's profiler
slows small operations down: shares of the large ones count.

    python benchmarks/profile_chains.py --chains 1 64
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable
from pathlib import Path
import tempfile
from typing import Any

import jax
from jax import lax, random
import step_cost

from numpyro_mhbt import MHBT, MHBTState

STEPS = 200
# What the runtime does around the operations.
_AROUND = ("$", "Pjit", "Thunk", "CommonPjRt", "while", "jit_")


def operations(run: Callable, *args: Any) -> Counter[str]:
    """Microseconds by operation, of a run that was compiled before."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run(*args))
        (file,) = Path(folder).rglob("*.xplane.pb")
        found = jax.profiler.ProfileData.from_file(str(file))
    spent: Counter[str] = Counter()
    for plane in found.planes:
        for line in plane.lines:
            for event in line.events:
                if not event.name.startswith(_AROUND):
                    spent[event.name] += event.duration_ns / 1e3
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--chains", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--most", type=int, default=8, help="operations to show")
    args = parser.parse_args()
    data = step_cost.make_data(10**5)
    kernel = MHBT(step_cost.model, c_n=20.0)

    @jax.jit
    def draws(state: MHBTState, data: tuple) -> MHBTState:
        return lax.scan(
            lambda s, _: (kernel.sample(s, data, {}), None), state, None, length=STEPS
        )[0]

    for k in args.chains:
        state = kernel.init(random.split(random.key(1), k), 0, None, data, {})
        jax.block_until_ready(draws(state, data))
        spent = operations(draws, state, data)
        print(f"\n| {k} chains: operation | µs a draw | share |\n| --- | --- | --- |")
        for name, time in spent.most_common(args.most):
            share = time / spent.total()
            print(f"| {name} | {time / STEPS:.1f} | {share:.0%} |")


if __name__ == "__main__":
    main()
