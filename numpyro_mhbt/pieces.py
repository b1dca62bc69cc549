"""What ``mcmc.run`` does, in pieces: the same draws, bit by bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
from jax import lax, random
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC
from numpyro.infer.mcmc import _collect_and_postprocess, _laxmap
from numpyro.util import is_prng_key
from tqdm.auto import tqdm

from numpyro_mhbt.chain import of_all_chains
from numpyro_mhbt.identity import of_run, of_step
from numpyro_mhbt.mesh import find_placement
from numpyro_mhbt.settings import Settings
from numpyro_mhbt.setup import read
from numpyro_mhbt.state import MHBTState

Piece = dict[str, Any]
"""Draws of each field, behind an axis of chains."""


class Task:
    """
    A run in pieces of any length.

    :param mcmc: with an :class:`~numpyro_mhbt.MHBT` kernel.
    :param rng_key: as for ``mcmc.run``, like all further arguments.
    """

    def __init__(
        self,
        mcmc: MCMC,
        rng_key: jax.Array,
        args: tuple,
        kwargs: dict[str, Any],
        extra_fields: tuple[str, ...],
        init_params: Any,
    ) -> None:
        if not isinstance(getattr(mcmc.sampler, "_settings", None), Settings):
            raise TypeError(f"Checkpoint needs a kernel MHBT, got {mcmc.sampler!r}.")
        data, _ = read(mcmc.sampler._settings.model, args, kwargs)
        if find_placement(data):
            raise NotImplementedError(
                "Checkpoint does not write runs on sharded data. Use `mcmc.run`, or "
                "put the data on one device."
            )
        self._mcmc = mcmc
        self._init_params = jax.tree.map(jnp.asarray, init_params)
        split = mcmc.num_chains > 1 and is_prng_key(rng_key)
        self._keys = random.split(rng_key, mcmc.num_chains) if split else rng_key
        self._mapped = mcmc.num_chains > 1 and mcmc.chain_method != "vectorized"
        warm = mcmc.post_warmup_state
        self._warm = None if warm is None else warm._replace(rng_key=self._keys)
        self.identity = of_run(
            mcmc, data, rng_key, extra_fields, self._init_params, self._warm
        )
        """What tells this run from others, but for the :meth:`program`."""
        self._lower = mcmc.num_warmup if warm is None else 0
        self.upper = self._lower + mcmc.num_samples
        # NumPyro's: of each group of `thinning` draws the last one is kept.
        self._first = self._lower + mcmc.num_samples % mcmc.thinning

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

    def program(self, state: MHBTState) -> dict[str, Any]:
        """What tells this model from others."""
        return of_step(self._mcmc, state, self._mapped)

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
    ) -> Iterator[tuple[MHBTState, int, Piece | None]]:
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
                piece = jax.tree.map(partial(self._by_chain, new), rows)
                if mcmc.num_chains == 1:
                    bar.set_postfix_str(mcmc.sampler.get_diagnostics_str(state))
                bar.update(count)
                yield state, done, piece if new else None

    def _spread(self, number: int) -> jax.Array:
        """One for each chain that is mapped."""
        shape = (self._mcmc.num_chains,) if self._mapped else ()
        return jnp.full(shape, number, jnp.int32)

    def _by_chain(self, count: int, rows: jax.Array) -> np.ndarray:
        """The first rows, behind an axis of chains as NumPyro has it."""
        if self._mcmc.num_chains == 1:
            rows = rows[None]
        elif not self._mapped:
            rows = jnp.swapaxes(rows, 0, 1)
        return np.asarray(rows)[:, :count]

    def _advance(self, num_rows: int, chain: tuple) -> tuple[MHBTState, Piece]:
        """Draws of one chain, or of all if they are vectorized."""
        state, begin, count = chain
        mcmc = self._mcmc
        if self.alike is not None and self._mapped:
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
        """``fn`` of one chain to one of all, the way NumPyro does it."""
        method = self._mcmc.chain_method
        if not self._mapped:
            return fn
        if method == "sequential":
            return partial(_laxmap, fn)
        return jax.pmap(fn) if method == "parallel" else method(fn)

    def finish(self, state: MHBTState, pieces: list[Piece]) -> None:
        """Leave the run as ``mcmc.run`` does."""
        mcmc = self._mcmc
        mcmc._states = jax.tree.map(
            lambda *x: jnp.asarray(np.concatenate(x, axis=1)), *pieces
        )
        mcmc._states_flat = None
        mcmc._last_state = state
        mcmc._set_collection_params()
        mcmc.sampler._sample_fn = "sample"  # or NumPyro runs `init` on resume


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
