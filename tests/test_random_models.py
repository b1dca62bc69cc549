"""
Random models: the mini-batch estimate, averaged over all batches, is NumPyro's own.

What is expected comes from NumPyro's ``potential_energy`` and log-densities of the
model with all rows. All of it is in double precision, so that nothing but rounding may
differ.
"""

from itertools import combinations, product

from hypothesis import example, given, seed, settings
from hypothesis import strategies as st
import jax
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
from numpyro import handlers
from numpyro.infer import init_to_uniform
from numpyro.infer.util import (
    compute_log_probs,
    constrain_fn,
    potential_energy,
    unconstrain_fn,
)
import pytest
from random_models import Description, Latent, Observed, Rows, build, descriptions

from numpyro_mhbt import full_data
from numpyro_mhbt.control import Reference
from numpyro_mhbt.plates import plates_of
from numpyro_mhbt.setup import read
from numpyro_mhbt.target import make_evaluate

TEMPERATURE = 3.0
ORDERS = [None, 0, 1, 2]
ROUNDING = 1e-9  # of sums of some dozen terms in double precision
# NumPyro asks for a reparametrisation of angles.
pytestmark = pytest.mark.filterwarnings("ignore:Continuous inference poorly handles")


def all_batches(plates):
    """The rows of every batch, stacked by plate."""
    choices = [combinations(range(p.size), p.subsample_size) for p in plates]
    every = zip(*product(*choices), strict=True)
    return {p.name: jnp.array(rows) for p, rows in zip(plates, every, strict=True)}


class Whole:
    """A model with all its rows, as NumPyro sees it."""

    def __init__(self, model, args, plates):
        self.model = handlers.seed(full_data(model), 0)
        self.args, self.plates = args, plates
        shapes = jax.eval_shape(self._start)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        flat, self.unravel = ravel_pytree(zeros)
        self.dim = flat.size

    def _start(self):
        start = handlers.substitute(self.model, substitute_fn=init_to_uniform)
        sites = handlers.trace(start).get_trace(*self.args)
        latent = {
            name: site["value"]
            for name, site in sites.items()
            if site["type"] == "sample" and not site["is_observed"]
        }
        return unconstrain_fn(self.model, self.args, {}, latent)

    def log_joint(self, z):
        """In unconstrained space."""
        return -potential_energy(self.model, self.args, {}, self.unravel(z))

    def sites(self, z):
        """In the constrained space: the log-density of rows, of the prior, of all."""
        values = constrain_fn(self.model, self.args, {}, self.unravel(z))
        given = handlers.substitute(self.model, data=values)
        log_probs, sites = compute_log_probs(given, self.args, {}, {})
        rows = prior = jnp.zeros(())
        for name, log_prob in log_probs.items():
            site = sites[name]
            if site["is_observed"] and plates_of(site, self.plates):
                rows += log_prob
            elif not site["is_observed"] or site["infer"].get("is_auxiliary"):
                prior += log_prob
        return rows, prior, sum(log_probs.values())

    def tempered(self, z, temper_prior):
        _, prior, everything = self.sites(z)
        hot = everything if temper_prior else everything - prior
        return self.log_joint(z) - hot + hot / TEMPERATURE

    def reference(self, z, order):
        """And the log-density of all rows there, which a control variate drops."""

        def rows(z):
            return self.sites(z)[0]

        if order is None:
            return None, 0.0
        ways = (rows, jax.grad(rows), jax.hessian(rows))[: order + 1]
        at, *derivatives = jax.jit(lambda z: [way(z) for way in ways])(z)
        return Reference(z, *derivatives), at


@jax.enable_x64(True)
def check(description, order, temper_prior):
    model, args = build(description)
    data, _ = read(model, args, {})
    whole = Whole(model, args, data.plates)
    rng = np.random.default_rng(description.seed)
    z, z_ref = 0.6 * jnp.asarray(rng.normal(size=(2, whole.dim)))

    def expected(z):
        return whole.tempered(z, temper_prior), whole.log_joint(z)

    (expected_value, log_joint), expected_grad = jax.jit(
        jax.value_and_grad(expected, has_aux=True)
    )(z)
    reference, dropped = whole.reference(z_ref, order)
    evaluate = make_evaluate(
        model,
        data,
        whole.unravel,
        jnp.asarray(TEMPERATURE),
        reference,
        bias_correction=False,
        temper_prior=temper_prior,
        gradient=True,
    )
    points = jax.jit(jax.vmap(evaluate, (None, 0)))(z, all_batches(data.plates))
    values = np.asarray(points.value) + dropped / TEMPERATURE
    close = {"rtol": ROUNDING, "atol": ROUNDING * np.abs(values).max()}
    np.testing.assert_allclose(values.mean(), expected_value, **close)
    np.testing.assert_allclose(points.grad.mean(0), expected_grad, **close)
    np.testing.assert_allclose(points.potential_energy.mean(), -log_joint, **close)
    check_noise(description, values, np.asarray(points.noise_variance), close)


def check_noise(description, values, noise, close):
    plates = description.plates
    inside = [site.plates for site in description.observed]
    drawn = [[k for k in group if not plates[k].whole] for group in inside]
    if any(plates[k].subsample_size == 1 for group in drawn for k in group):
        assert np.isnan(noise).all()  # a single row shows no spread
    elif any(len(group) > 1 for group in drawn):
        # An upper bound where rows of several plates meet.
        assert noise.mean() >= (1 - ROUNDING) * values.var()
    else:
        np.testing.assert_allclose(noise.mean(), values.var(), **close)


every_model = given(descriptions(), st.sampled_from(ORDERS), st.booleans())
some = settings(max_examples=25, deadline=None, database=None)


LATENT_IN_WHOLE_PLATE = Description(
    (Latent("affine", "rows"),), (Rows(2, 1),), (Observed("bernoulli"),)
)
JACOBIAN_IN_SCOPE = Description(
    (Latent("half_normal", "scope"),), (Rows(3, 2),), (Observed("beta"),)
)


@settings(some, max_examples=8, derandomize=True)
@example(LATENT_IN_WHOLE_PLATE, None, False)
@example(JACOBIAN_IN_SCOPE, 0, True)
@every_model
def test_average_over_all_batches(description, order, temper_prior):
    check(description, order, temper_prior)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_average_over_all_batches_of_many_models(part):
    """Five hundred of them, in parts that can run side by side."""
    seed(part)(some(every_model(check)))()
    jax.clear_caches()
