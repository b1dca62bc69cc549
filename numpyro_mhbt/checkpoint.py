"""Runs that can be killed at any moment and go on where they were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
import dataclasses
from functools import partial
import hashlib
from importlib.metadata import version
import json
import os
from pathlib import Path
from typing import Any
import uuid

import jax
from jax import lax, random
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
from numpyro.infer.mcmc import _collect_and_postprocess
from numpyro.util import is_prng_key
from tqdm.auto import tqdm

from numpyro_mhbt.kernel import of_all_chains
from numpyro_mhbt.mesh import find_placement
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.setup import read
from numpyro_mhbt.state import MHBTState
from numpyro_mhbt.storage import is_scratch, load, locked, save
from numpyro_mhbt.target import fingerprint

_SMALL = 2**20
_SHORT = 80


class Checkpoint:
    """
    A run that goes on where it was when its process ended, by whatever cause.

    ``Checkpoint(path).run(mcmc, rng_key, ...)`` stands for ``mcmc.run(rng_key, ...)``
    and gives the same draws, bit by bit. Every so often the state of the chains and
    the draws since the last time are written to ``path``. The same call in a new
    process then reads them and draws the rest; how often it was interrupted makes no
    difference. Once the run is complete, the call only reads. Afterwards ``mcmc`` is
    as after :meth:`~numpyro.infer.mcmc.MCMC.run`: summaries, ArviZ and resuming work.

    Files are written beside the old ones and then renamed, so that a checkpoint is
    whole or not there. They are NumPy archives without pickled objects, with a
    checksum and all that tells this run from others: if model, data, seed or a setting
    are not those of the checkpoint, a ``ValueError`` says which, and nothing is
    overwritten. Neither is a damaged or foreign file. If a file cannot be written, as
    when the disk is full, an ``OSError`` ends the run and the last checkpoint stays.

    :param path: a directory, which is made if need be. One for each run.
    :param int every: draws of each chain from one checkpoint to the next, warm-up
        included. It may change when the run goes on.

    **Example**

    .. doctest::

        >>> from tempfile import TemporaryDirectory
        >>> from jax import random
        >>> import numpyro, numpyro.distributions as dist
        >>> from numpyro.infer import MCMC
        >>> from numpyro_mhbt import MHBT, Checkpoint
        >>> def model(y):
        ...     mu = numpyro.sample("mu", dist.Normal(0, 10))
        ...     with numpyro.plate("N", len(y), subsample_size=100):
        ...         numpyro.sample("y", dist.Normal(mu, 1), obs=numpyro.subsample(y, 0))
        >>> y = 3 + random.normal(random.key(0), (10_000,))
        >>> mcmc = MCMC(MHBT(model, c_n=10), num_warmup=500, num_samples=1000,
        ...             progress_bar=False)
        >>> with TemporaryDirectory() as path:
        ...     Checkpoint(path, every=400).run(mcmc, random.key(1), y)
        >>> draws = mcmc.get_samples()["mu"]
        >>> mcmc.run(random.key(1), y)
        >>> bool((mcmc.get_samples()["mu"] == draws).all())
        True
    """

    def __init__(self, path: str | os.PathLike, every: int = 1000) -> None:
        if not isinstance(every, int | np.integer) or every < 1:
            raise ValueError(f"`every` must be a positive integer, got {every!r}.")
        self.path = Path(path)
        self.every = int(every)

    def run(
        self,
        mcmc: MCMC,
        rng_key: jax.Array,
        /,
        *args: Any,
        extra_fields: tuple[str, ...] | list[str] = (),
        init_params: Any = None,
        **kwargs: Any,
    ) -> None:
        """
        As :meth:`~numpyro.infer.mcmc.MCMC.run`, from the last checkpoint if there is
        one.

        :param mcmc: with an :class:`~numpyro_mhbt.MHBT` kernel.
        :param rng_key: as for ``mcmc.run``, like all further arguments.
        """
        if not isinstance(getattr(mcmc.sampler, "_settings", None), Settings):
            raise TypeError(f"Checkpoint needs a kernel MHBT, got {mcmc.sampler!r}.")
        if find_placement(read(mcmc.sampler._settings.model, args, kwargs)[0]):
            raise NotImplementedError(
                "Checkpoint does not write runs on sharded data. Use `mcmc.run`, or "
                "put the data on one device."
            )
        task = _Task(mcmc, rng_key, args, kwargs, tuple(extra_fields), init_params)
        _claim(self.path)
        with locked(self.path):
            files = _Files(self.path, task.identity())
            before, begin, pieces = files.open(task)
            state = before
            try:
                for state, done, piece in task.go_on(before, begin, self.every):
                    pieces += [piece] if piece else []
                    files.add(task, state, done, piece)
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"stopped; {files.kept} The same call goes on from there."
                ) from None
            except OSError as error:
                raise OSError(
                    error.errno,
                    f"The checkpoint could not be written ({error.strerror or error}); "
                    f"{files.kept} Make room, and the same call goes on from there",
                    str(self.path),
                ) from error
        task.finish(state, pieces)


def _claim(path: Path) -> None:
    """Make the directory, or refuse one that is used for something else."""
    if path.exists() and not path.is_dir():
        raise ValueError(
            f"'{path}' is a file, and a checkpoint needs a directory. It was left as "
            "it is. Choose another path."
        )
    path.mkdir(parents=True, exist_ok=True)
    if (path / _STATE).exists():
        return
    others = sorted(p.name for p in path.iterdir() if not is_scratch(p))
    if others:
        raise ValueError(
            f"'{path}' has no checkpoint but other files ({', '.join(others[:3])}). "
            "They were left as they are. Choose a path that is empty or does not exist."
        )


_STATE = "state.npz"


class _Files:
    """
    ``state.npz`` and the draws of each piece, by number.

    The state names the pieces that belong to it. So a piece that was written before
    the process ended, but whose state was not, does not count.
    """

    def __init__(self, path: Path, identity: dict[str, Any]) -> None:
        self._path = path
        self._meta: dict[str, Any] = {"run": uuid.uuid4().hex, "identity": identity}
        self._digests: list[str] = []
        self.kept = "nothing was kept."

    def open(self, task: _Task) -> tuple[MHBTState, int, list[dict[str, Any]]]:
        """State, number of draws and the pieces so far, perhaps none."""
        if (self._path / _STATE).exists():
            return self._load(task)
        state = task.start()
        self._meta["identity"] |= task.program(state)
        try:
            self.add(task, state, 0, None)
        except OSError as error:
            raise OSError(
                error.errno, f"No checkpoint could be written ({error})", self._path
            ) from error
        return state, 0, []

    def _load(self, task: _Task) -> tuple[MHBTState, int, list[dict[str, Any]]]:
        meta, tree, _ = load(self._path / _STATE)
        if "identity" not in meta:
            raise ValueError(
                f"'{self._path / _STATE}' is not the state of a run but some of its "
                "draws. It was left as it is. Choose another path."
            )
        self._compare(meta["identity"], self._meta["identity"])
        state = jax.tree.map(jnp.asarray, tree.build())
        self._compare(meta["identity"], task.program(state))
        pieces = []
        for number, digest in enumerate(meta["pieces"], start=1):
            name = self._piece(number)
            if not name.exists():
                raise ValueError(
                    f"'{name}' is missing, and the run cannot go on without its draws. "
                    "Put it back, or choose another path."
                )
            _, rows, found = load(name)
            if found != digest:
                raise ValueError(
                    f"'{name}' is not the file that belongs to this checkpoint. It was "
                    "left as it is. Put the right one back, or choose another path."
                )
            pieces.append(rows.build())
        following = self._piece(len(pieces) + 1)
        if following.exists() and load(following)[0].get("run") != meta["run"]:
            raise ValueError(
                f"'{following}' is of another run and in the way of the next draws. It "
                "was left as it is. Move it away, or choose another path."
            )
        self._meta, self._digests = meta, meta["pieces"]
        task.alike = meta["alike"]
        self._remember(task, meta["done"])
        return state, meta["done"], pieces

    def add(
        self, task: _Task, state: MHBTState, done: int, piece: dict[str, Any] | None
    ) -> None:
        """The draws first: without the state they do not count."""
        digests = self._digests
        if piece:
            meta = {"run": self._meta["run"], "draws_so_far": done}
            name = self._piece(len(digests) + 1)
            digests = [*digests, save(name, meta, piece)]
        meta = {**self._meta, "done": done, "pieces": digests, "alike": task.alike}
        save(self._path / _STATE, meta, state)
        self._digests = digests
        self._remember(task, done)

    def _remember(self, task: _Task, done: int) -> None:
        self.kept = (
            f"the last checkpoint in '{self._path}', after {done} of {task.upper} "
            "draws (warm-up included), is intact."
        )

    def _piece(self, number: int) -> Path:
        return self._path / f"draws-{number:06d}.npz"

    def _compare(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        now = json.loads(json.dumps(now))
        differing = [
            f"`{name}` ({_shortened(before.get(name))} there, {_shortened(value)} here)"
            for name, value in now.items()
            if before.get(name) != value
        ]
        if differing:
            raise ValueError(
                f"The checkpoint in '{self._path}' is of another run: it differs in "
                f"{', '.join(differing)}. It was left as it is. Choose another path, "
                "or restore what the run began with."
            )


def _shortened(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 1]}…"


class _Task:
    """What ``mcmc.run`` would do, in pieces of any length."""

    def __init__(
        self,
        mcmc: MCMC,
        rng_key: jax.Array,
        args: tuple,
        kwargs: dict[str, Any],
        extra_fields: tuple[str, ...],
        init_params: Any,
    ) -> None:
        self._mcmc = mcmc
        typed = jnp.issubdtype(rng_key.dtype, jax.dtypes.prng_key)
        self._given_key = rng_key if typed else random.wrap_key_data(rng_key)
        self._init_params = jax.tree.map(jnp.asarray, init_params)
        self._extra_fields = extra_fields
        several = mcmc.num_chains > 1
        self._keys = (
            random.split(rng_key, mcmc.num_chains)
            if several and is_prng_key(rng_key)
            else rng_key
        )
        warm = mcmc.post_warmup_state
        self._warm = None if warm is None else warm._replace(rng_key=self._keys)
        lower = mcmc.num_warmup if warm is None else 0
        self.upper = lower + mcmc.num_samples
        self._lower = lower
        # NumPyro's: of each group of `thinning` draws the last one is kept.
        self._first = lower + mcmc.num_samples % mcmc.thinning

        mcmc._args, mcmc._kwargs = args, kwargs
        self._sample, postprocess = mcmc._get_cached_fns()
        field = mcmc._sample_field
        names = dict.fromkeys((field, *mcmc._default_fields, *extra_fields))
        left_out = tuple(n for n in names if n.startswith(f"~{field}."))
        self._fields = tuple(n for n in names if n not in left_out)
        self._collect = _collect_and_postprocess(
            postprocess, self._fields, tuple(n[len(field) + 2 :] for n in left_out)
        )
        self.alike: list[bool] | None = None
        """Leaves of the state of which ``jax.vmap`` makes one for all chains."""

    def identity(self) -> dict[str, Any]:
        """What must be the same for the draws to be the same, as JSON."""
        mcmc = self._mcmc
        method = mcmc.chain_method
        data, _ = read(mcmc.sampler._settings.model, mcmc._args, mcmc._kwargs)
        shapes = jax.tree.map(_describe_shape, (data.args, data.kwargs))
        return {
            **{name: version(name) for name in ("numpyro", "jax", "jaxlib")},
            "numpyro_mhbt": _own_version(),
            "platform": jax.default_backend(),
            "jax_enable_x64": jax.config.read("jax_enable_x64"),
            **{f"MHBT.{k}": v for k, v in _describe(mcmc.sampler._settings).items()},
            "num_warmup": mcmc.num_warmup,
            "num_samples": mcmc.num_samples,
            "thinning": mcmc.thinning,
            "num_chains": mcmc.num_chains,
            "chain_method": method if isinstance(method, str) else _describe(method),
            "jit_model_args": mcmc._jit_model_args,
            "extra_fields": sorted(self._extra_fields),
            "rng_key": _describe(self._given_key),
            "init_params": _describe(self._init_params),
            "post_warmup_state": _describe(self._warm),
            "data": [str(int(fingerprint(data))), str(shapes)],
        }

    def program(self, state: MHBTState) -> dict[str, Any]:
        """A step as JAX sees it: another model has another one."""
        mcmc = self._mcmc
        mapped = mcmc.num_chains > 1 and mcmc.chain_method != "vectorized"
        # Shapes alone: arrays of several devices make another program.
        state = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape[mapped:], x.dtype), state
        )
        trace = jax.make_jaxpr(
            lambda state: mcmc.sampler.sample(state, mcmc._args, mcmc._kwargs)
        )
        code = hashlib.sha256()
        for part in _walk(trace(state)):
            code.update(part.encode())
        return {"model": code.hexdigest()}

    def start(self) -> MHBTState:
        """The state before the first draw, with an axis of chains if there are any."""
        if self._warm is not None:
            return self._warm

        def init(chain: tuple) -> MHBTState:
            key, init_params = chain
            mcmc = self._mcmc
            state = mcmc.sampler.init(
                key, mcmc.num_warmup, init_params, mcmc._args, mcmc._kwargs
            )
            self._note(state)
            return state

        return self._map(init)((self._keys, self._init_params))

    def go_on(
        self, state: MHBTState, done: int, every: int
    ) -> Iterator[tuple[MHBTState, int, dict[str, Any] | None]]:
        """State, number of draws, and those to be kept, after each piece."""
        mcmc = self._mcmc
        thinning = mcmc.thinning
        advance = self._map(partial(self._advance, (every - 1) // thinning + 2))
        with tqdm(total=self.upper, initial=done, disable=not mcmc.progress_bar) as bar:
            while done < self.upper:
                bar.set_description("warmup" if done < self._lower else "sample")
                count = min(every, self.upper - done)
                row = max((done - self._first) // thinning, 0)
                begin = done - self._first - row * thinning
                state, rows = advance((state, self._spread(begin), self._spread(count)))
                done += count
                new = max((done - self._first) // thinning - row, 0)
                # Wait: a checkpoint must not say more than has been computed.
                rows = jax.tree.map(lambda x, new=new: np.asarray(x)[:, :new], rows)
                if mcmc.num_chains == 1:
                    bar.set_postfix_str(mcmc.sampler.get_diagnostics_str(state))
                bar.update(count)
                yield state, done, rows if new else None

    def _spread(self, number: int) -> jax.Array:
        """One for each chain that is mapped."""
        many = self._mcmc.num_chains > 1 and self._mcmc.chain_method != "vectorized"
        return jnp.full((self._mcmc.num_chains,) if many else (), number, jnp.int32)

    def _advance(self, num_rows: int, chain: tuple) -> tuple[MHBTState, dict[str, Any]]:
        """Draws of one chain, or of all if they are vectorized."""
        state, begin, count = chain
        mcmc = self._mcmc
        if self.alike is not None and mcmc.num_chains > 1:
            # As in an unbroken run, for mapped arrays are rounded in other ways.
            leaves, tree = jax.tree.flatten(state)
            pairs = zip(leaves, self.alike, strict=True)
            leaves = [of_all_chains(x) if alike else x for x, alike in pairs]
            state = jax.tree.unflatten(tree, leaves)
        jit_args = (mcmc._args, mcmc._kwargs) if mcmc._jit_model_args else ()
        (state, *_), rows = _loop(
            self._sample, self._collect, num_rows, mcmc.thinning,
            (state, *jit_args), begin, count,
        )  # fmt: skip
        self._note(state)
        return state, dict(zip(self._fields, rows, strict=True))

    def _note(self, state: MHBTState) -> None:
        """Which leaves are alike: at the start more of them than after some draws."""
        if callable(self._mcmc.chain_method):
            leaves = jax.tree.leaves(state)
            self.alike = [not isinstance(x, jax.core.Tracer) for x in leaves]

    def _map(self, fn: Callable) -> Callable:
        """
        ``fn`` of one chain to one of all, the way NumPyro does it.

        Draws, which are along the first axis, get an axis of chains before that.
        """
        mcmc = self._mcmc
        if mcmc.num_chains == 1 or mcmc.chain_method == "vectorized":
            axis = (lambda x: x[None]) if mcmc.num_chains == 1 else _swap
            return lambda chain: _on_draws(axis, fn(chain))
        if mcmc.chain_method == "sequential":
            return lambda chains: jax.tree.map(
                lambda *x: jnp.stack(x),
                *(
                    fn(jax.tree.map(lambda x, c=c: x[c], chains))
                    for c in range(mcmc.num_chains)
                ),
            )
        if mcmc.chain_method == "parallel":
            return jax.pmap(fn)
        return mcmc.chain_method(fn)

    def finish(self, state: MHBTState, pieces: list[dict[str, Any]]) -> None:
        """Leave the run as ``mcmc.run`` does."""
        mcmc = self._mcmc
        mcmc._states = jax.tree.map(
            lambda *x: jnp.asarray(np.concatenate(x, axis=1)), *pieces
        )
        mcmc._states_flat = None
        mcmc._last_state = state
        mcmc._set_collection_params()
        mcmc.sampler._sample_fn = "sample"  # or NumPyro runs `init` on resume


def _swap(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, 0, 1)


def _on_draws(fn: Callable, result: Any) -> Any:
    """Apply ``fn`` to the draws if there are any beside the state."""
    if isinstance(result, MHBTState):
        return result
    state, rows = result
    return state, jax.tree.map(fn, rows)


@partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _loop(
    sample: Callable,
    collect: Callable,
    num_rows: int,
    thinning: int,
    val: tuple,
    begin: jax.Array,
    count: jax.Array,
) -> tuple[tuple, Any]:
    """
    NumPyro's loop, with a number of draws that is not known to the compiler.

    :param begin: number of the first draw, which goes to row ``begin // thinning``.
    """
    begin, count = of_all_chains(begin), of_all_chains(count)
    rows = jax.tree.map(
        lambda x: jnp.zeros((num_rows, *x.shape), x.dtype), jax.eval_shape(collect, val)
    )

    def body(k: jax.Array, carry: tuple) -> tuple:
        val, rows = carry
        val = sample(val)
        row = (begin + k) // thinning

        def put(rows: jax.Array, new: jax.Array) -> jax.Array:
            return lax.cond(row >= 0, lambda: rows.at[row].set(new), lambda: rows)

        return val, jax.tree.map(put, rows, collect(val))

    return lax.fori_loop(0, count, body, (val, rows))


def _own_version() -> str:
    from numpyro_mhbt import __version__

    return __version__


def _describe_shape(x: Any) -> str:
    return f"{x.dtype}{list(x.shape)}" if isinstance(x, jax.Array) else _named(x)


def _describe(value: Any) -> Any:
    """A setting as JSON that is the same in another process."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, jax.Array | np.ndarray | np.generic):
        return _describe_array(value)
    if isinstance(value, Mapping):
        return {str(key): _describe(x) for key, x in value.items()}
    if isinstance(value, MHBTState):
        return [_describe(x) for x in jax.tree.leaves(value)]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: _describe(getattr(value, name)) for name in names}
    if isinstance(value, tuple | list):
        return [_describe(x) for x in value]
    return _named(value)


def _named(value: Any) -> str:
    """By name, for a ``repr`` may have an address in it."""
    if isinstance(value, str | int | float | None):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _describe_array(array: Any) -> str:
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        kind = str(random.key_impl(array))
        return f"{kind} {_describe_array(random.key_data(array))}"
    array = np.asarray(array)
    if array.size <= 4:
        return str(array.tolist())
    few = array
    if array.nbytes > _SMALL:
        places = np.linspace(0, array.size - 1, 1024).astype(int)
        few = array[np.unravel_index(places, array.shape)]
    code = hashlib.sha256(np.ascontiguousarray(few).tobytes()).hexdigest()[:16]
    return f"{array.dtype}{list(array.shape)} {code}"


def _walk(program: Any) -> Iterator[str]:
    """Operations, shapes and constants of a program, and of those within it."""
    if isinstance(program, ClosedJaxpr):
        yield from (_describe_array(x) for x in program.consts if hasattr(x, "dtype"))
        program = program.jaxpr
    for equation in program.eqns:
        yield equation.primitive.name
        for x in equation.invars:
            if isinstance(x, Literal):
                yield repr(np.asarray(x.val).tolist())
        for x in equation.outvars:
            yield f"{getattr(x.aval, 'dtype', '')}{getattr(x.aval, 'shape', '')}"
        for param in equation.params.values():
            for inner in param if isinstance(param, tuple | list) else (param,):
                if isinstance(inner, ClosedJaxpr | Jaxpr):
                    yield from _walk(inner)
