"""
How long a new user waits for the first draw, and the most memory that takes.

Prints seconds (compilation included, imports and data not) and megabytes, for one
system in a process of its own: ``suite.py`` starts several, in turn.

    python benchmarks/first_draw.py MHBT
"""

from __future__ import annotations

import argparse
from pathlib import Path
import time

import jax
from jax import random
import jax.numpy as jnp
from models import Problem, logistic
from numpyro.infer import HMCECS, MCMC, NUTS
from numpyro.infer.mcmc import MCMCKernel

from numpyro_mhbt import MHBT, Taylor, full_data


def hmcecs(problem: Problem) -> MCMCKernel:
    proxy = HMCECS.taylor_proxy({"w": jnp.zeros(problem.args[0].shape[1])}, degree=2)
    return HMCECS(NUTS(problem.model), num_blocks=10, proxy=proxy)


SYSTEMS = {
    "MHBT": lambda problem: MHBT(problem.model),
    "MHBT, order 2": lambda problem: MHBT(
        problem.model, control_variate=Taylor(order=2)
    ),
    "HMCECS, Taylor 2": hmcecs,
    "NUTS": lambda problem: NUTS(full_data(problem.model)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("--rows", type=int, default=10**5)
    args = parser.parse_args()
    problem = logistic(args.rows)
    jax.block_until_ready(problem.args)
    begin = time.perf_counter()
    mcmc = MCMC(
        SYSTEMS[args.system](problem),
        num_warmup=0,
        num_samples=1,
        progress_bar=False,
        jit_model_args=True,
    )
    mcmc.run(random.key(0), *problem.args)
    jax.block_until_ready(mcmc.get_samples())
    seconds = time.perf_counter() - begin
    print(f"{seconds:.3f} {peak_memory():.0f}")


def peak_memory() -> float:
    """Of this process, in megabytes. (``ru_maxrss`` is inherited from its parent.)"""
    lines = Path("/proc/self/status").read_text().splitlines()
    (peak,) = (line.split()[1] for line in lines if line.startswith("VmHWM"))
    return int(peak) / 1024


if __name__ == "__main__":
    main()
