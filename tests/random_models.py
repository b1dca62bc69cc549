"""Random NumPyro models, as descriptions that print and shrink."""

from contextlib import ExitStack
from dataclasses import dataclass

from hypothesis import strategies as st
import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro import handlers
from numpyro.contrib.control_flow import scan
import numpyro.distributions as dist
from numpyro.distributions import constraints, transforms
from numpyro.infer.reparam import LocScaleReparam, TransformReparam


@dataclass(frozen=True)
class Latent:
    kind: str
    wrap: str = ""
    """How it is repeated or handled: a key of :data:`WRAPS`."""


@dataclass(frozen=True)
class Rows:
    """A subsampled plate."""

    size: int
    subsample_size: int

    @property
    def whole(self):
        return self.subsample_size == self.size


@dataclass(frozen=True)
class Observed:
    family: str
    plates: tuple[int, ...] = (0,)
    """Those of :attr:`Description.plates` it stands in; none: outside of all."""
    by_index: bool = True
    """Whether data are taken by the rows' numbers or by ``numpyro.subsample``."""
    inner: bool = False
    """Whether a plate that is not subsampled lies within."""
    handler: str = ""
    """``"mask"``, ``"scale"``, ``"scope"`` or none."""


@dataclass(frozen=True)
class Description:
    latent: tuple[Latent, ...]
    plates: tuple[Rows, ...]
    observed: tuple[Observed, ...]
    seed: int = 0
    """Of data, and of the points to look at."""


def _real_mixture():
    parts = dist.Normal(jnp.array([-1.0, 1.0]), 0.7)
    return dist.MixtureSameFamily(dist.Categorical(jnp.array([0.4, 0.6])), parts)


def _ordered():
    base = dist.Normal(0, 1).expand([3]).to_event(1)
    return dist.TransformedDistribution(base, transforms.OrderedTransform())


def _affine():
    chain = [transforms.AffineTransform(0.5, -2.0), transforms.ExpTransform()]
    return dist.TransformedDistribution(dist.Normal(0, 0.5), chain)


def _tril():
    return jnp.array([[1.0, 0.0], [0.4, 0.8]])


LATENT = {
    "normal": lambda: dist.Normal(0.3, 1.2),
    "student": lambda: dist.StudentT(4.0, 0.0, 1.0),
    "half_normal": lambda: dist.HalfNormal(1.5),
    "gamma": lambda: dist.Gamma(2.0, 1.5),
    "log_normal": lambda: dist.LogNormal(0.2, 0.6),
    "half_cauchy": lambda: dist.HalfCauchy(1.0),
    "beta": lambda: dist.Beta(2.0, 3.0),
    "uniform": lambda: dist.Uniform(-1.0, 3.0),
    "truncated": lambda: dist.TruncatedNormal(0.5, 1.0, low=-1.0),
    "below": lambda: dist.TruncatedNormal(0.5, 1.0, high=1.0),
    "circular": lambda: dist.VonMises(0.5, 2.0),
    "affine": _affine,
    "real_mixture": _real_mixture,
    "flat": lambda: dist.ImproperUniform(constraints.positive, (), ()),
    "softplus": lambda: dist.ImproperUniform(constraints.softplus_positive, (), ()),
    "normal_vector": lambda: dist.MultivariateNormal(jnp.zeros(2), scale_tril=_tril()),
    "walk": lambda: dist.GaussianRandomWalk(0.7, 3),
    "simplex": lambda: dist.Dirichlet(jnp.array([2.0, 1.0, 3.0])),
    "zero_sum": lambda: dist.ZeroSumNormal(1.0, (3,)),
    "ordered": _ordered,
    "cholesky": lambda: dist.LKJCholesky(3, 1.5),
    "correlation": lambda: dist.LKJ(3, 1.5),
    "matrix": lambda: dist.Normal(0, 1).expand([2, 2]).to_event(2),
    "positive_matrix": lambda: dist.Gamma(2.0, 1.0).expand([2, 2]).to_event(1),
}
SCALAR = [kind for kind in LATENT if LATENT[kind]().event_dim == 0]
SCALED = {"normal": (), "student": ("df",)}
"""Those that LocScaleReparam knows."""

WRAPS = {
    "": "as it is",
    "event": "expanded to an event of two",
    "batch": "expanded to a batch of two",
    "plate": "in a plate of two that is not subsampled",
    "scale": "under handlers.scale",
    "mask": "under handlers.mask",
    "scope": "under handlers.scope",
    "reparam": "under handlers.reparam",
    "factor": "with a factor beside it",
    "deterministic": "seen through a deterministic site",
    "bound": "the lower bound of another latent site",
    "scan": "drawn along a scan",
    "rows": "in a plate with subsample_size that is whole",
}


def _latent_value(name, latent):
    """One latent site, or some; a number between -1 and 1 that depends on them."""
    make, wrap = LATENT[latent.kind], latent.wrap
    with ExitStack() as stack:
        fn = make()
        if wrap == "event":
            fn = fn.expand((2, *fn.batch_shape)).to_event(1)
        elif wrap == "batch":
            fn = fn.expand((2, *fn.batch_shape))
        elif wrap == "plate":
            stack.enter_context(numpyro.plate(f"{name}_plate", 2, dim=-3))
        elif wrap == "rows":
            whole = numpyro.plate(f"{name}_rows", 2, subsample_size=2, dim=-3)
            stack.enter_context(whole)
        elif wrap == "scale":
            stack.enter_context(handlers.scale(scale=0.3))
        elif wrap == "mask":
            stack.enter_context(handlers.mask(mask=False))
        elif wrap == "scope":
            stack.enter_context(handlers.scope(prefix="inside"))
        elif wrap == "reparam":
            how = TransformReparam()
            if latent.kind in SCALED:
                how = LocScaleReparam(0.3, shape_params=SCALED[latent.kind])
            stack.enter_context(handlers.reparam(config={name: how}))
            if latent.kind in SCALED:
                fn = fn.expand((2,)).to_event(1)
            else:
                shift = transforms.AffineTransform(0.1, 2.0)
                fn = dist.TransformedDistribution(fn, shift)
        if wrap == "scan":

            def transition(carry, _):
                x = numpyro.sample(name, make())
                return carry + jnp.sum(x), x

            _, value = scan(transition, jnp.zeros(()), None, length=2)
        else:
            value = numpyro.sample(name, fn)
        if wrap == "bound":
            low = jnp.sum(value)
            more = numpyro.sample(f"{name}_more", dist.Uniform(low, low + 2.0))
            value = jnp.append(jnp.ravel(value), more)
        elif wrap == "factor":
            numpyro.factor(f"{name}_factor", -0.2 * jnp.sum(jnp.tanh(value)))
        elif wrap == "deterministic":
            value = numpyro.deterministic(f"{name}_seen", 2 * value)
    weights = 0.5 + 0.3 * jnp.arange(value.size)
    return jnp.tanh(0.5 * jnp.sum(jnp.ravel(value) * weights) / value.size)


def _pair(eta):
    """A vector of two by row."""
    return jnp.stack([eta, -0.5 * eta], axis=-1)


def _positive(eta):
    return jnp.exp(0.3 * eta)


def _parts(eta):
    parts = dist.Normal(_pair(eta), 0.8)
    return dist.MixtureSameFamily(dist.Categorical(logits=_pair(0.4 * eta)), parts)


# Family to distribution given a predictor, how values are made of standard normal
# numbers, and the event's shape.
FAMILIES = {
    "normal": (lambda eta: dist.Normal(eta, 1.1), lambda x: x, ()),
    "student": (lambda eta: dist.StudentT(3.0, eta, _positive(eta)), lambda x: x, ()),
    "logistic": (lambda eta: dist.Logistic(eta, 0.7), lambda x: x, ()),
    "mixture": (_parts, lambda x: x, ()),
    "gamma": (lambda eta: dist.Gamma(2.0, _positive(eta)), np.exp, ()),
    "log_normal": (lambda eta: dist.LogNormal(eta, 0.8), np.exp, ()),
    "beta": (
        lambda eta: dist.Beta(2.0, _positive(eta)),
        lambda x: 1 / (1 + np.exp(-x)),
        (),
    ),
    "poisson": (
        lambda eta: dist.Poisson(_positive(eta)),
        lambda x: np.floor(np.abs(2 * x)).astype(int),
        (),
    ),
    "negative_binomial": (
        lambda eta: dist.NegativeBinomial2(_positive(eta), 1.5),
        lambda x: np.floor(np.abs(2 * x)).astype(int),
        (),
    ),
    "zero_inflated": (
        lambda eta: dist.ZeroInflatedPoisson(0.3, _positive(eta)),
        lambda x: np.floor(np.abs(x)).astype(int),
        (),
    ),
    "bernoulli": (
        lambda eta: dist.Bernoulli(logits=eta),
        lambda x: (x > 0).astype(int),
        (),
    ),
    "binomial": (
        lambda eta: dist.Binomial(3, logits=eta),
        lambda x: np.clip(np.floor(x + 2), 0, 3).astype(int),
        (),
    ),
    "categorical": (
        lambda eta: dist.Categorical(logits=_pair(eta)),
        lambda x: (x > 0).astype(int),
        (),
    ),
    "ordered": (
        lambda eta: dist.OrderedLogistic(eta, jnp.array([-0.5, 0.8])),
        lambda x: np.clip(np.floor(x + 1), 0, 2).astype(int),
        (),
    ),
    "normal_vector": (
        lambda eta: dist.MultivariateNormal(_pair(eta), scale_tril=_tril()),
        lambda x: x,
        (2,),
    ),
    "event": (lambda eta: dist.Normal(_pair(eta), 1.0).to_event(1), lambda x: x, (2,)),
    "factor": (None, lambda x: x, ()),
}


def build(description):
    """The model, and its arguments."""
    rng = np.random.default_rng(description.seed)
    sizes = [plate.size for plate in description.plates]
    data = []
    for site in description.observed:
        # One axis for each of at most two plates, and one for the plate within.
        axes = [sizes[k] if k in site.plates else 1 for k in range(len(sizes))]
        shape = (2 if site.inner else 1, *([1] * (2 - len(sizes))), *axes)
        _, values, event = FAMILIES[site.family]
        y = np.asarray(values(rng.normal(size=shape + event)))
        y = y.astype(float) if y.dtype.kind == "f" else y
        data.append((jnp.asarray(rng.normal(size=shape)), jnp.asarray(y)))

    def model(data):
        shared = sum(
            (k + 1) * 0.5 * _latent_value(f"x{k}", latent)
            for k, latent in enumerate(description.latent)
        )
        last = len(description.plates)
        plates = [
            numpyro.plate(f"N{k}", *(plate.size, plate.subsample_size), dim=k - last)
            for k, plate in enumerate(description.plates)
        ]
        for k, site in enumerate(description.observed):
            _observe(f"y{k}", site, plates, data[k], shared)

    return model, (data,)


def _observe(name, site, plates, data, shared):
    make, _, event = FAMILIES[site.family]
    x, y = data
    with ExitStack() as stack:
        if site.inner:
            stack.enter_context(numpyro.plate(f"{name}_inner", 2, dim=-3))
        for k in site.plates:
            rows = stack.enter_context(plates[k])
            if site.by_index:
                x = jnp.take(x, rows, plates[k].dim)
                y = jnp.take(y, rows, plates[k].dim - len(event))
        if not site.by_index:
            x, y = numpyro.subsample(x, 0), numpyro.subsample(y, len(event))
        if site.handler == "mask":
            stack.enter_context(handlers.mask(mask=x > -0.5))
        elif site.handler == "scale":
            stack.enter_context(handlers.scale(scale=1.7))
        elif site.handler == "scope":
            stack.enter_context(handlers.scope(prefix="inside"))
        eta = shared * x + 0.2
        if make is None:
            numpyro.factor(name, -(jnp.abs(y - eta) ** 1.5))
        else:
            numpyro.sample(name, make(eta), obs=y)


def _wraps(kind):
    if kind in ("correlation", "cholesky"):
        # NumPyro's own transforms of these know no more axes than one.
        return st.sampled_from(["", "factor", "deterministic", "scope", "scale"])
    if kind not in SCALAR:
        # A scan of ordered vectors has no density in NumPyro itself.
        no = ("reparam", "event", "scan" if kind == "ordered" else "")
        return st.sampled_from(["", *(w for w in WRAPS if w not in no)])
    if kind in ("flat", "softplus", "below", "circular", "real_mixture"):
        return st.sampled_from([w for w in WRAPS if w != "reparam"])
    return st.sampled_from(sorted(WRAPS))


latents = st.sampled_from(sorted(LATENT)).flatmap(
    lambda kind: st.builds(Latent, st.just(kind), _wraps(kind))
)


@st.composite
def rows(draw):
    size = draw(st.integers(1, 5))
    return Rows(size, draw(st.integers(1, size)))


@st.composite
def descriptions(draw):
    """Models with one or two subsampled plates so small that batches can be counted."""
    plates = draw(st.lists(rows(), min_size=1, max_size=2))
    groups = [(k,) for k in range(len(plates))]
    if len(plates) == 2:
        groups.append((0, 1))
    observed = st.builds(
        Observed,
        st.sampled_from(sorted(FAMILIES)),
        st.sampled_from([*groups, ()]),
        st.booleans(),
        st.booleans(),
        st.sampled_from(["", "mask", "scale", "scope"]),
    )
    some = st.builds(
        Observed, st.sampled_from(sorted(FAMILIES)), st.sampled_from(groups)
    )
    return Description(
        tuple(draw(st.lists(latents, min_size=1, max_size=3))),
        tuple(plates),
        (draw(some), *draw(st.lists(observed, max_size=1))),
        draw(st.integers(0, 2**16)),
    )
