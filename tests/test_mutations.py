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
EVERY = "tests/test_exact.py::test_every_proposal_samples_the_augmented_marginal"
AVERAGE = (
    "tests/test_models.py::test_average_over_all_batches_is_the_log_density_of_all_rows"
)

MUTANTS = {
    "Jacobian tempered": (
        "target.py",
        "value = (terms.prior + likelihood) / temperature + terms.log_det",
        "value = (terms.prior + likelihood + terms.log_det) / temperature",
        "tests/test_conjugate.py::test_beta_bernoulli[8.0]",
    ),
    "batch drawn anew on rejection": (
        "step.py",
        " = point._replace(value=forgotten, grad=new.grad) if refresh else point\n",
        " = evaluate(point.z, batch)\n",
        EVERY + "[walk-6.0]",
    ),
    "normalising constant dropped": (
        "proposals.py",
        "gap += 2 * grad.size * jnp.log(knobs.beta)",
        "gap += 0.0",
        EVERY + "[beta3.0_coin0.5-6.0]",
    ),
    "batch with replacement": (
        "plates.py",
        "return random.permutation(rng_key, n)[:m]",
        "return random.randint(rng_key, (m,), 0, n)",
        EVERY + "[walk-6.0]",
    ),
    "branch weight wrong": (
        "proposals.py",
        "math.log((1 - self.forward_prob) / self.forward_prob)",
        "math.log(self.forward_prob / (1 - self.forward_prob))",
        EVERY + "[beta3.0_coin0.8-6.0]",
    ),
    "gradient of the old batch on the way back": (
        "proposals.py",
        "both = move.noise, grad + new_grad",
        "both = move.noise, grad + grad",
        EVERY + "[SGLD-6.0]",
    ),
    "proposal density ignored": (
        "step.py",
        "        return proposal.log_ratio(move, grad, ",
        "        return 0 * proposal.log_ratio(move, grad, ",
        EVERY + "[SGLD-6.0]",
    ),
    "gradient not whitened": (
        "step.py",
        "        new_grad = whiten(mass_sqrt_inv, new.grad)",
        "        new_grad = new.grad",
        "tests/test_exact.py::test_two_dimensions_with_a_mass_matrix[False]",
    ),
    "user's scale dropped": (
        "target.py",
        "others = tuple(a for a in range(log_prob.ndim) if a not in axes)\n",
        "others = tuple(a for a in range(log_prob.ndim) if a not in axes)\n"
        "    weight = math.prod(p.size / p.subsample_size for p in plates)\n"
        '    log_prob = log_prob / site["scale"] * weight\n',
        AVERAGE + "[scaled]",
    ),
    "finite population ignored": (
        "target.py",
        "factor = (1 - m / n) * float(n) ** 2 / m",
        "factor = float(n) ** 2 / m",
        AVERAGE + "[plain]",
    ),
    "control variate added": (
        "control.py",
        "return row - jnp.where(jnp.isfinite(at_reference), at_reference, 0.0)",
        "return row + jnp.where(jnp.isfinite(at_reference), at_reference, 0.0)",
        "tests/test_exact.py::test_control_variate_of_order_0[walk]",
    ),
    "second derivative not halved": (
        "control.py",
        "lambda a, b, c: a + b + c / 2",
        "lambda a, b, c: a + b + c",
        AVERAGE + "[plain]",
    ),
    "sum of slopes dropped": (
        "control.py",
        "known = reference.grad @ step",
        "known = 0 * reference.grad @ step",
        AVERAGE + "[plain]",
    ),
    "bias doubled instead of taken away": (
        "target.py",
        "value -= noise / 2",
        "value += noise / 2",
        "tests/test_exact.py::test_bias_correction_with_every_order[2-5-1.0-walk]",
    ),
    "blocks overlap": (
        "plates.py",
        "fresh = candidates[jnp.argsort(is_kept, stable=True)]",
        "fresh = candidates",
        "tests/test_control.py::test_blocks_stay_distinct_and_uniform",
    ),
    "value of another temperature kept": (
        "chain.py",
        "point = now._replace(value=jnp.where(forgotten, point.value, now.value))",
        "pass",
        "tests/test_control.py::test_value_is_that_of_the_present_temperature",
    ),
    "fourth moment for fourth cumulant": (
        "passes.py",
        " - 3 * m1**4 - 3 * second**2",
        " - 3 * m1**4",
        "tests/test_control.py::test_cumulants_of_independent_rows",
    ),
    "pilot run goes the wrong way": (
        "pilot.py",
        "jnp.log(noise / settings.target_noise)",
        "jnp.log(settings.target_noise / noise)",
        "tests/test_control.py::test_pilot_run_where_no_gaussian_fits",
    ),
    # (Were it to fall too slowly, it would be loud at every T, and a pilot run decide.)
    "noise falls too fast with T": (
        "prepare.py",
        "noise /= temperatures**2",
        "noise /= temperatures**3",
        "tests/test_control.py::test_noise_is_near_its_target",
    ),
    "reference goes down where nothing is concave": (
        "temperature.py",
        "np.maximum(np.abs(values), 1e-300)",
        "values",
        "tests/test_control.py::test_reference_climbs_out_of_where_nothing_is_concave",
    ),
    "sums subtracted instead of terms": (
        "proposals.py",
        "along = gain * move.width * (there + dot(new_grad, noise))",
        "along = (jnp.sum((move.width * noise + gain * both) ** 2)"
        " - jnp.sum((move.width * noise) ** 2)) / 2 - half",
        "tests/test_proposals.py::test_single_precision_in_high_dimension[2.0-exact]",
    ),
    "rows overlap": (
        "plates.py",
        "lambda x: jnp.any(x >= n), lambda x: jnp.where(x >= n, permute(x), x), rows",
        "lambda x: jnp.any(x >= n), lambda x: jnp.where(x >= n, x - n, x), rows",
        "tests/test_plates.py::test_rows_are_distinct_and_in_range[1009-1008]",
    ),
    "weights to the wrong power": (
        "posterior.py",
        "(1 - 1 / temperature) * tempered",
        "(1 / temperature) * tempered",
        "tests/test_untemper.py::test_weights_lead_to_the_conjugate_posterior"
        "[5.0-True]",
    ),
    "weights without the prior": (
        "posterior.py",
        "likelihood + prior if settings.temper_prior else likelihood",
        "likelihood",
        "tests/test_untemper.py::test_weights_lead_to_the_conjugate_posterior"
        "[5.0-True]",
    ),
    "steps tuned to avoid regions without density": (
        "chain.py",
        "_ASTRAY = 0.5",
        "_ASTRAY = 0.0",
        "tests/test_faults.py::test_steps_between_walls[5.0]",
    ),
    "steps not shortened by what diverges": (
        "chain.py",
        "_ASTRAY = 0.5",
        "_ASTRAY = 1.0",
        "tests/test_faults.py::test_steps_between_walls[0.05]",
    ),
    "warm-up comes again": (
        "chain.py",
        "jnp.minimum(i, _LAST - 1) + 1",
        "i + 1",
        "tests/test_faults.py::test_more_draws_than_a_counter_holds",
    ),
    "parameters that are NaN pass": (
        "checks.py",
        'return missing | _has_nan(site["fn"])',
        "return missing",
        "tests/test_errors.py::test_missing_covariate_of_a_binary_outcome[0]",
    ),
    "rows in every step drawn as well": (
        "control.py",
        "known = are_among(drawn, self.always)",
        "known = drawn < 0",
        AVERAGE + "[plain]",
    ),
    "one coordinate far from the mode": (
        "prepare.py",
        "decrement <= step.size / 4 and bool(np.all(np.abs(step) <= sd))",
        "decrement <= step.size / 4",
        "tests/test_exact_rows.py::test_reference_is_near_the_mode_in_every_coordinate",
    ),
    "step size led by the overall rate": (
        "chain.py",
        "jnp.where(info.diverging, otherwise, info.paired_accept_prob)",
        "jnp.where(info.diverging, otherwise, info.accept_prob)",
        "tests/test_adaptation.py::test_step_size_does_not_collapse_in_loud_noise[SGLD]",
    ),
}


QUICK = {
    "Jacobian tempered",
    "normalising constant dropped",
}


def _param(name):
    """Each mutant takes a process of its own, so the default run has but some."""
    return pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)


@pytest.mark.parametrize("name", [_param(name) for name in MUTANTS])
def test_mutant_is_caught(name, tmp_path):
    file, right, wrong, test = MUTANTS[name]
    for part in ("numpyro_mhbt", "tests"):
        shutil.copytree(ROOT / part, tmp_path / part)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    source = tmp_path / "numpyro_mhbt" / file
    text = source.read_text()
    assert text.count(right) == 1
    source.write_text(text.replace(right, wrong))
    # The test may be a slow one, which is not run unless asked for.
    command = [sys.executable, "-m", "pytest", "-q", "-m", "", test]
    result = subprocess.run(
        [*command, "-p", "no:cacheprovider", "-p", "no:xdist"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, result.stdout
    assert "1 failed" in result.stdout
