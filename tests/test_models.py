"""
Any model: the mini-batch log-density, averaged over all batches, is NumPyro's own.

Each model has few rows, so that all batches can be enumerated.
"""

from itertools import combinations, product

from flax import nnx
import flax.linen as nn
import jax
from jax import random
from jax.flatten_util import ravel_pytree
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.module import random_flax_module, random_nnx_module
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import MCMC, init_to_median
from numpyro.infer.util import (
    constrain_fn,
    log_density,
    potential_energy,
)
from numpyro.infer.util import (
    log_likelihood as numpyro_log_likelihood,
)
import pytest

from numpyro_mhbt import MHBT, Taylor, full_data, log_likelihood, passes
from numpyro_mhbt.control import Reference
from numpyro_mhbt.prepare import prepare
from numpyro_mhbt.setup import read
from numpyro_mhbt.target import log_terms, make_evaluate, total

X = random.normal(random.key(0), (5, 3))
Y = random.normal(random.key(1), (5,))


def rows_of(y, m=2, name="N", dim=None):
    return numpyro.plate(name, len(y), subsample_size=m, dim=dim)


def plain(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with rows_of(y) as idx:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[idx])


def subsample_style(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([3]).to_event(1))
    with numpyro.plate("N", len(x), subsample_size=2):
        xb, yb = numpyro.subsample(x, event_dim=1), numpyro.subsample(y, event_dim=0)
        numpyro.sample("y", dist.Bernoulli(logits=xb @ w), obs=(yb > 0) * 1.0)


def constrained(y):
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    share = numpyro.sample("share", dist.Dirichlet(jnp.ones(3)))
    p = numpyro.sample("p", dist.Uniform(-1.0, 3.0))
    cuts = numpyro.sample(
        "cuts",
        dist.TransformedDistribution(
            dist.Normal(0, 1).expand([3]), dist.transforms.OrderedTransform()
        ),
    )
    chol = numpyro.sample("chol", dist.LKJCholesky(3, 1.5))
    loc = cuts @ share + p * chol[1, 0]
    with rows_of(y) as idx:
        numpyro.sample("y", dist.StudentT(4.0, loc, scale), obs=y[idx])


def dynamic_support(y):
    low = numpyro.sample("low", dist.Normal(-5, 1))
    width = numpyro.sample("width", dist.Uniform(low, low + 10.0))
    with rows_of(y) as idx:
        numpyro.sample("y", dist.Normal(width, 1), obs=y[idx])


def deterministic(y):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.deterministic("b", jnp.exp(a))
    with rows_of(y) as idx:
        numpyro.sample("y", dist.Normal(b, 1), obs=y[idx])


def factors(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    numpyro.factor("outside", -0.3 * mu**2)
    numpyro.sample("z", dist.Normal(mu, 2), obs=0.7)
    with rows_of(y) as idx:
        numpyro.factor("inside", -jnp.abs(y[idx] - mu))


def masked(y):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with rows_of(y) as idx, handlers.mask(mask=y[idx] > 0):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[idx])


def scaled(y):
    with handlers.scale(scale=0.5):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
    with rows_of(y) as idx, handlers.scale(scale=3.0):
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[idx])


def improper(y):
    mu = numpyro.sample("mu", dist.ImproperUniform(constraints.real, (), ()))
    scale = numpyro.sample("scale", dist.ImproperUniform(constraints.positive, (), ()))
    with rows_of(y) as idx:
        numpyro.sample("y", dist.Normal(mu, scale), obs=y[idx])


def two_plates(y, x):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with rows_of(y) as idx:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[idx])
    with rows_of(x, 3, "K") as idx:
        numpyro.sample("x", dist.Normal(mu, 2).expand([3]).to_event(1), obs=x[idx])


def two_sites(y):
    """Two sites in one plate, whose rows go together."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with rows_of(y) as idx:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[idx])
        numpyro.sample("z", dist.Normal(-mu, 1), obs=y[idx] ** 2)


def nested_in_plain(x):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("columns", 3, dim=-1):
        b = numpyro.sample("b", dist.Normal(mu, 1))
        with rows_of(x, dim=-2):
            xb = numpyro.subsample(x, event_dim=0)
            numpyro.sample("x", dist.Normal(b, 1), obs=xb)


def crossed(x):
    """Two subsampled plates on one site."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    rows, columns = rows_of(x, dim=-2), rows_of(x.T, 2, "K", dim=-1)
    with rows as i, columns as j:
        numpyro.sample("x", dist.Normal(mu, 1), obs=x[i[:, None], j])
    with columns as j:
        numpyro.sample("z", dist.Normal(mu, 3), obs=x[0, j])


def repeated(x):
    """A row of data seen by several parameters at once."""
    mu = numpyro.sample("mu", dist.Normal(0, 1).expand([2, 1, 3]).to_event(3))
    with numpyro.plate("observers", 2, dim=-2), rows_of(x, dim=-1):
        obs = numpyro.subsample(x, event_dim=1)
        numpyro.sample("x", dist.Normal(mu, 1).to_event(1), obs=obs)


def keyword(*, y=None, m=3):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with rows_of(y, m) as idx:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[idx])


def flax_network(x, y):
    net = random_flax_module("net", nn.Dense(1), dist.Normal(0, 1), input_shape=(3,))
    with rows_of(y) as idx:
        numpyro.sample("y", dist.Normal(net(x[idx])[:, 0], 1), obs=y[idx])


def half_flax_network(x, y):
    """The bias has no prior: it stays at its first value, the same in all chains."""
    prior = {"kernel": dist.Normal(0, 1)}
    net = random_flax_module("net", nn.Dense(1), prior, input_shape=(3,))
    with rows_of(y) as idx:
        numpyro.sample("y", dist.Normal(net(x[idx])[:, 0], 1), obs=y[idx])


def nnx_network(x, y):
    linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    net = random_nnx_module("net", linear, dist.Normal(0, 1))
    with rows_of(y) as idx:
        numpyro.sample("y", dist.Normal(net(x[idx])[:, 0], 1), obs=y[idx])


def whole(y):
    """m = n"""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with rows_of(y, len(y)) as idx:
        numpyro.sample("y", dist.Normal(mu, 1), obs=y[idx])


MODELS = [
    (plain, (Y,), {}),
    (subsample_style, (X, Y), {}),
    (constrained, (Y,), {}),
    (dynamic_support, (Y,), {}),
    (deterministic, (Y,), {}),
    (factors, (Y,), {}),
    (masked, (Y,), {}),
    (scaled, (Y,), {}),
    (improper, (Y,), {}),
    (two_plates, (Y, X), {}),
    (two_sites, (Y,), {}),
    (nested_in_plain, (X,), {}),
    (crossed, (X,), {}),
    (repeated, (X,), {}),
    (keyword, (), {"y": Y}),
    (flax_network, (X, Y), {}),
    (half_flax_network, (X, Y), {}),
    (nnx_network, (X, Y), {}),
    (whole, (Y,), {}),
]
MUCH_THE_SAME = {subsample_style, two_sites, repeated, keyword, whole, improper, scaled}
every_model = pytest.mark.parametrize(
    "model, args, kwargs", MODELS, ids=[model.__name__ for model, _, _ in MODELS]
)


def all_batches(plates):
    choices = [combinations(range(p.size), p.subsample_size) for p in plates]
    for rows in product(*choices):
        yield {p.name: jnp.array(r) for p, r in zip(plates, rows, strict=True)}


@every_model
def test_average_over_all_batches_is_the_log_density_of_all_rows(model, args, kwargs):
    temperature = 3.0
    data, _ = read(model, args, kwargs)
    kernel = MHBT(model, control_variate=None, temperature=1.0)
    setup = prepare(kernel._settings, kernel._programs, data)
    data = data._replace(params=setup.shared.params)
    flat, unravel = ravel_pytree(setup.z)
    flat = flat + 0.3 * random.normal(random.key(2), flat.shape)

    prepared = handlers.substitute(full_data(model), data=data.params)
    prepared = handlers.seed(prepared, 0)

    def log_joint(flat):
        return -potential_energy(prepared, args, kwargs, unravel(flat))

    def log_det(flat):
        values = constrain_fn(prepared, args, kwargs, unravel(flat))
        return log_joint(flat) - log_density(prepared, args, kwargs, values)[0]

    def tempered(flat):
        return (log_joint(flat) - log_det(flat)) / temperature + log_det(flat)

    def full_rows(flat):
        """Log-likelihood of all rows: a control variate leaves out that at θ_ref."""
        every = {p.name: jnp.arange(p.size) for p in data.plates}
        return total(log_terms(model, data, unravel(flat), every).rows)

    expected, gradient = jax.jit(jax.value_and_grad(tempered))(flat)
    energy = -jax.jit(log_joint)(flat)

    at = flat + 0.1
    at_reference, grad, hessian = jax.jit(
        lambda z: (full_rows(z), jax.grad(full_rows)(z), jax.hessian(full_rows)(z))
    )(at)
    references = [
        None,
        Reference(at),
        Reference(at, grad),
        Reference(at, grad, hessian),
    ]
    if len(data.plates) == 1:
        references.append(references[-1]._replace(always=jnp.array([0, 3])))
    for reference in references:
        evaluate = make_evaluate(
            model,
            data,
            unravel,
            jnp.asarray(temperature),
            reference,
            bias_correction=False,
            temper_prior=True,
            gradient=True,
        )
        batches = list(all_batches(data.plates))
        stacked = jax.tree.map(lambda *rows: jnp.stack(rows), *batches)
        points = jax.jit(jax.vmap(evaluate, in_axes=(None, 0)))(flat, stacked)
        mean_energy = np.mean(points.potential_energy)
        assert mean_energy == pytest.approx(float(energy), rel=1e-4)
        np.testing.assert_allclose(
            np.mean(points.grad, axis=0), gradient, rtol=1e-3, atol=1e-4
        )
        values = np.asarray(points.value)
        shift = 0.0 if reference is None else float(at_reference) / temperature
        assert values.mean() + shift == pytest.approx(
            float(expected), rel=1e-4, abs=1e-4
        )
        noise = np.mean(points.noise_variance)
        if model is crossed:  # there the estimate is an upper bound
            assert noise > 0.99 * values.var()
        else:
            assert noise == pytest.approx(values.var(), rel=1e-3, abs=1e-6)


@pytest.mark.filterwarnings("ignore:MHBT. What Taylor")  # five rows
@pytest.mark.parametrize(
    "model, args, kwargs",
    [case for case in MODELS if case[0] in (plain, two_plates, crossed)],
)
def test_pass_over_all_rows_in_chunks(model, args, kwargs, monkeypatch):
    """Chunks of two or three rows, the last one reaching back."""
    monkeypatch.setattr(passes, "few_batches", lambda group: 0)
    monkeypatch.setattr(passes, "_MIN_CHUNK", 3)
    data, _ = read(model, args, kwargs)
    kernel = MHBT(model, temperature=1.0, control_variate=Taylor(order=2))
    shared = prepare(kernel._settings, kernel._programs, data).shared
    data = data._replace(params=shared.params)
    unravel = ravel_pytree(kernel._programs.look(data, jnp.ones(())).z)[1]
    every = {p.name: jnp.arange(p.size) for p in data.plates}

    def full_rows(flat):
        return total(log_terms(model, data, unravel(flat), every).rows)

    grad, hessian = shared.reference.grad, shared.reference.hessian
    at = shared.reference.z
    np.testing.assert_allclose(jax.grad(full_rows)(at), grad, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(
        jax.hessian(full_rows)(at), hessian, rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize(
    "model, args, kwargs",
    [
        pytest.param(*case, id=case[0].__name__, marks=marks)
        for case in MODELS
        for marks in [pytest.mark.slow if case[0] in MUCH_THE_SAME else []]
    ],
)
@pytest.mark.filterwarnings("ignore:MHBT. the noise")  # few rows, few steps
@pytest.mark.filterwarnings("ignore:MHBT. . of 2 chain")
def test_runs(model, args, kwargs):
    kernel = MHBT(model, temperature=2.0, control_variate=Taylor(order=0))
    mcmc = MCMC(
        kernel,
        num_warmup=20,
        num_samples=20,
        num_chains=2,
        chain_method="vectorized",
        progress_bar=False,
    )
    mcmc.run(random.key(0), *args, extra_fields=("accepted", "temperature"), **kwargs)
    samples = mcmc.get_samples(group_by_chain=True)
    names = set(mcmc.last_state.z) | ({"b"} if model is deterministic else set())
    assert set(samples) == names
    for value in jax.tree.leaves(samples):
        assert value.shape[:2] == (2, 20)
        assert np.all(np.isfinite(value))
    assert np.all(mcmc.get_extra_fields()["temperature"] == 2.0)
    assert np.sum(mcmc.get_extra_fields()["accepted"]) > 0


@every_model
def test_log_likelihood_of_all_rows(model, args, kwargs):
    """In chunks of two rows, the last one reaching back."""
    whole_model = handlers.seed(full_data(model), 0)
    start = handlers.substitute(whole_model, substitute_fn=init_to_median)
    sites = handlers.trace(start).get_trace(*args, **kwargs).values()
    latent = {
        site["name"]: jnp.stack([site["value"], 0.9 * site["value"]])
        for site in sites
        if site["type"] == "sample" and not site["is_observed"]
    }
    found = log_likelihood(model, latent, *args, chunk_size=2, **kwargs)
    expected = numpyro_log_likelihood(whole_model, latent, *args, **kwargs)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_number_of_rows():
    def n(model, *args):
        return read(model, args, {})[0].num_rows

    assert n(plain, Y) == 5
    assert n(two_sites, Y) == 5
    assert n(two_plates, Y, X) == 10
    assert n(crossed, X) == 15 + 3
    assert n(nested_in_plain, X) == 5
    assert n(whole, Y) == 5


def test_number_of_rows_without_any_plate():
    def model(y, x):
        mu = numpyro.sample("mu", dist.Normal())
        numpyro.sample("y", dist.Normal(mu, 1), obs=y)
        numpyro.sample("x", dist.Normal(mu, jnp.ones(3)).to_event(1), obs=x)
        numpyro.factor("f", -(mu**2))

    assert read(model, (Y, X), {})[0].num_rows == Y.size + len(X)
