"""Runs that can be killed at any moment and go on where they were."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
import uuid

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC

from numpyro_mhbt.identity import differences
from numpyro_mhbt.pieces import Piece, Task
from numpyro_mhbt.state import MHBTState
from numpyro_mhbt.storage import is_scratch, load, locked, save

_STATE = "state.npz"


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
        task = Task(mcmc, rng_key, args, kwargs, tuple(extra_fields), init_params)
        _claim(self.path)
        with locked(self.path):
            files = _Files(self.path, task)
            before, begin, pieces = files.open()
            state = before
            try:
                for state, done, piece in task.go_on(before, begin, self.every):
                    pieces += [piece] if piece else []
                    files.add(state, done, piece)
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


class _Files:
    """
    ``state.npz`` and the draws of each piece, by number.

    The state names the pieces that belong to it. So a piece that was written before
    the process ended, but whose state was not, does not count.
    """

    def __init__(self, path: Path, task: Task) -> None:
        self._path, self._task = path, task
        self._meta: dict[str, Any] = {
            "run": uuid.uuid4().hex,
            "identity": task.identity,
            "done": 0,
            "pieces": [],
        }

    @property
    def kept(self) -> str:
        """What there is, in words."""
        return (
            f"the last checkpoint in '{self._path}', after {self._meta['done']} of "
            f"{self._task.upper} draws (warm-up included), is intact."
        )

    def open(self) -> tuple[MHBTState, int, list[Piece]]:
        """State, number of draws and the pieces so far, perhaps none."""
        if (self._path / _STATE).exists():
            return self._load()
        state = self._task.start()
        self._meta["identity"] = self._task.identity | self._task.program(state)
        try:
            self.add(state, 0, None)
        except OSError as error:
            raise OSError(
                error.errno, f"No checkpoint could be written ({error})", self._path
            ) from error
        return state, 0, []

    def _load(self) -> tuple[MHBTState, int, list[Piece]]:
        meta, tree, _ = load(self._path / _STATE)
        if "identity" not in meta:
            raise ValueError(
                f"'{self._path / _STATE}' is not the state of a run but some of its "
                "draws. It was left as it is. Choose another path."
            )
        self._compare(meta["identity"], self._task.identity)
        state = jax.tree.map(jnp.asarray, tree.build())
        self._compare(meta["identity"], self._task.program(state))
        digests = enumerate(meta["pieces"], start=1)
        pieces = [self._load_piece(number, digest) for number, digest in digests]
        following = self._piece(len(pieces) + 1)
        if following.exists() and load(following)[0].get("run") != meta["run"]:
            raise ValueError(
                f"'{following}' is of another run and in the way of the next draws. It "
                "was left as it is. Move it away, or choose another path."
            )
        self._meta, self._task.alike = meta, meta["alike"]
        return state, meta["done"], pieces

    def _load_piece(self, number: int, digest: str) -> Piece:
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
        return rows.build()

    def add(self, state: MHBTState, done: int, piece: Piece | None) -> None:
        """The draws first: without the state they do not count."""
        digests = self._meta["pieces"]
        if piece:
            meta = {"run": self._meta["run"], "draws_so_far": done}
            digests = [*digests, save(self._piece(len(digests) + 1), meta, piece)]
        now = {"done": done, "pieces": digests, "alike": self._task.alike}
        meta = self._meta | now
        save(self._path / _STATE, meta, state)
        self._meta = meta

    def _piece(self, number: int) -> Path:
        return self._path / f"draws-{number:06d}.npz"

    def _compare(self, before: dict[str, Any], now: dict[str, Any]) -> None:
        differing = differences(before, now)
        if differing:
            raise ValueError(
                f"The checkpoint in '{self._path}' is of another run: it differs in "
                f"{', '.join(differing)}. It was left as it is. Choose another path, "
                "or restore what the run began with."
            )
