"""
Wrong variants that the suite must catch.

Each mutant replaces one line of a copy of the package and runs the test that guards it,
which must fail.
"""

from pathlib import Path
import shutil
import subprocess
import sys

import pytest

ROOT = Path(__file__).parent.parent

MUTANTS = {
    "Jacobian tempered": (
        "target.py",
        "value = (terms.prior + likelihood) / temperature + terms.log_det",
        "value = (terms.prior + likelihood + terms.log_det) / temperature",
        "tests/test_conjugate.py::test_beta_bernoulli[8.0]",
    ),
    "batch drawn anew on rejection": (
        "step.py",
        "    kept = point\n",
        "    kept = evaluate(point.z, batch)\n",
        "tests/test_exact.py -k RandomWalk-and-6.0",
    ),
    "normalising constant dropped": (
        "proposals.py",
        '(2 * jnp.log(knobs.beta) if self.hastings == "exact" else 0.0)',
        "0.0",
        "tests/test_exact.py -k beta=3.0-and-forward_prob=0.5-and-6.0",
    ),
    "batch with replacement": (
        "plates.py",
        "return random.permutation(rng_key, n)[:m]",
        "return random.randint(rng_key, (m,), 0, n)",
        "tests/test_exact.py -k RandomWalk-and-6.0",
    ),
    "branch weight wrong": (
        "proposals.py",
        "math.log((1 - self.forward_prob) / self.forward_prob)",
        "math.log(self.forward_prob / (1 - self.forward_prob))",
        "tests/test_exact.py -k beta=3.0-and-forward_prob=0.8-and-6.0",
    ),
    "gradient of the old batch on the way back": (
        "proposals.py",
        "both = gain * (grad + new_grad)",
        "both = gain * (grad + grad)",
        "tests/test_exact.py -k SGLD-and-step_size=1.0-and-6.0",
    ),
    "proposal density ignored": (
        "step.py",
        "        + proposal.log_ratio(move, grad, ",
        "        + 0 * proposal.log_ratio(move, grad, ",
        "tests/test_exact.py -k SGLD-and-step_size=1.0-and-6.0",
    ),
    "gradient not whitened": (
        "step.py",
        "proposal.log_ratio(move, grad, _whiten(mass_sqrt_inv, new.grad), knobs)",
        "proposal.log_ratio(move, grad, new.grad, knobs)",
        "tests/test_exact.py -k two_dimensions-and-False",
    ),
    "user's scale dropped": (
        "target.py",
        "others = tuple(a for a in range(log_prob.ndim) if a not in axes)\n",
        "others = tuple(a for a in range(log_prob.ndim) if a not in axes)\n"
        '    log_prob = log_prob / site["scale"] * _weight(plates)\n',
        "tests/test_models.py -k average-and-scaled",
    ),
    "finite population ignored": (
        "target.py",
        "factor = (1 - m / n) * float(n) ** 2 / m",
        "factor = float(n) ** 2 / m",
        "tests/test_models.py -k average-and-plain",
    ),
    "control variate added": (
        "target.py",
        "rows = jax.tree.map(jnp.subtract, rows, at_reference)",
        "rows = jax.tree.map(jnp.add, rows, at_reference)",
        "tests/test_exact.py -k control_variate-and-RandomWalk",
    ),
    "sums subtracted instead of terms": (
        "proposals.py",
        "    width = 1024\n",
        "    return jnp.sum(x + 1e3) - 1e3 * x.size\n    width = 1024\n",
        "tests/test_proposals.py -k single_precision-and-2.0-exact",
    ),
    "rows overlap": (
        "plates.py",
        "lambda x: jnp.any(x >= n), lambda x: jnp.where(x >= n, permute(x), x), rows",
        "lambda x: jnp.any(x >= n), lambda x: jnp.where(x >= n, x - n, x), rows",
        "tests/test_plates.py -k distinct-and-1008",
    ),
    "ceiling ignored": (
        "adaptation.py",
        "self._update(i, probe.paired, ",
        "self._update(i, probe.paired * probe.ceiling, ",
        "tests/test_adaptation.py -k collapse",
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name, tmp_path):
    file, right, wrong, test = MUTANTS[name]
    for part in ("numpyro_mhbt", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "numpyro_mhbt" / file
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))
    path, *selection = test.split(" -k ")
    options = ["-k", selection[0].replace("-and-", " and ")] if selection else []
    command = [sys.executable, "-m", "pytest", "-x", "-q", path, *options]
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout
    assert "1 failed" in result.stdout
