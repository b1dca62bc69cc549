"""
``MHBT(model)`` with no other argument on ten models: does it mix, and does it say so?

    python benchmarks/untouched.py --output table.md
"""

from __future__ import annotations

import argparse
from pathlib import Path
import warnings

from jax import random
from models import SYNTHETIC
from numpyro.infer import MCMC

from numpyro_mhbt import MHBT, batch_report


def row(name: str, temper_prior: bool) -> str:
    problem = SYNTHETIC[name]()
    mcmc = MCMC(
        MHBT(problem.model, temper_prior=temper_prior),
        num_warmup=2000,
        num_samples=10_000,
        num_chains=4,
        chain_method="vectorized",
        progress_bar=False,
        jit_model_args=True,
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mcmc.run(random.key(0), *problem.args)
        report = batch_report(mcmc)
    said = {str(w.message).split(". ")[0] for w in caught if "MHBT" in str(w.message)}
    return (
        f"| {name} | {report.temperature:.4g} | {report.noise_variance:.2g} | "
        f"{report.accept_prob:.2f} of {report.accept_ceiling:.2f} | "
        f"{1000 * report.ess_per_gradient:.1f} | {report.r_hat:.3f} | "
        f"{' '.join(sorted(said)) or 'none'} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[1])
    parser.add_argument("--only", nargs="+", default=list(SYNTHETIC), choices=SYNTHETIC)
    parser.add_argument("--keep-prior", action="store_true", help="do not temper it")
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    lines = [
        "| model | T | v | acceptance | ESS per 1000 gradients | R-hat | warning |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    print("\n".join(lines))
    for name in args.only:
        lines.append(row(name, not args.keep_prior))
        print(lines[-1], flush=True)
    if args.output is not None:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
