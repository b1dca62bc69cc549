"""A killed run ends with the very draws of an unbroken one, and nothing is lost."""

from contextlib import contextmanager
import errno
from functools import cache, partial
import io
import json
import os
from pathlib import Path
import random as dice
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
import pytest
from test_contract import VMAP, compiled

from numpyro_mhbt import MHBT, Checkpoint, Taylor, batch_report, storage, to_arviz
from numpyro_mhbt.control import Reference

# As users compile. Programs that are not optimised are rounded in ways of their own.
pytestmark = pytest.mark.long_chains
ROOT = Path(__file__).parent.parent
Y = jnp.asarray(np.random.default_rng(0).normal(0.5, 1.0, 200), jnp.float32)
KEY = random.key(1)
FIELDS = ("accept_prob", "z.mu", "~z.tau")


def model(y, scale=2.0):
    mu = numpyro.sample("mu", dist.Normal(0, scale))
    sd = numpyro.sample("net/sd", dist.Uniform(0.5, 2))
    numpyro.sample("tau", dist.Gamma(2, 2))
    numpyro.deterministic("ratio", jnp.stack([mu / sd, sd]))
    shift = numpyro.param("shift", jnp.zeros(2))
    with numpyro.plate("N", len(y), subsample_size=40):
        obs = numpyro.subsample(y, 0)
        numpyro.sample("y", dist.Normal(mu + shift[0], sd), obs=obs)


KERNEL = MHBT(model, c_n=20)


def make_mcmc(kernel=KERNEL, **options):
    options = {"num_warmup": 50, "num_samples": 62, "thinning": 3, **options}
    return MCMC(kernel, progress_bar=False, **options)


def result(mcmc):
    """All that a run leaves, as NumPy arrays by name."""
    mine = mcmc.get_samples(True), mcmc.get_extra_fields(True), mcmc.last_state
    found = jax.tree_util.tree_leaves_with_path(mine)
    return {jax.tree_util.keystr(path): plain(leaf) for path, leaf in found}


def plain(leaf):
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(random.key_data(leaf) if is_key else leaf)


def assert_identical(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype, name
        np.testing.assert_array_equal(value, other[name], err_msg=name)


class Killed(BaseException):
    """Stands for the end of the process: nothing that follows reaches the disk."""


class Disk:
    """Counts what is done to files, and fails from the ``at``-th time on."""

    def __init__(self, at=None, error=Killed, torn=False):
        self.at, self.error, self.torn = at, error, torn
        self.done = []

    def do(self, what, act=lambda: None, half=lambda: None):
        self.done.append(what)
        if self.at is None or len(self.done) <= self.at:
            return act()
        if self.torn and len(self.done) == self.at + 1:
            half()
        raise self.error()

    def open(self, path, mode):
        disk = self

        class File(io.FileIO):
            def write(self, data):
                half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
                write = super().write
                return disk.do("write", lambda: write(data), lambda: write(half))

        if mode != "wb":
            return open(path, mode)
        return disk.do("open", lambda: File(path, mode))

    @contextmanager
    def mounted(self):
        fsync, replace = os.fsync, os.replace
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(storage, "open", self.open, raising=False)
            patch.setattr(
                storage.os, "fsync", lambda f: self.do("fsync", lambda: fsync(f))
            )
            patch.setattr(
                storage.os,
                "replace",
                lambda a, b: self.do("replace", lambda: replace(a, b)),
            )
            yield self


def contents(path):
    return {p.name: p.read_bytes() for p in Path(path).iterdir() if p.name != ".lock"}


@pytest.fixture
def path():
    """Gone after the test, unlike pytest's own, for there are many of them."""
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "run"


slow = pytest.mark.slow
CHAINS = [
    ("sequential", 1, {"num_warmup": 0}),
    pytest.param("sequential", 2, {}, marks=slow),
    pytest.param("parallel", 2, {}, marks=slow),
    ("vectorized", 2, {"jit_model_args": True}),
    pytest.param(*VMAP.values, {}, id="jax.vmap", marks=[slow, *VMAP.marks]),
]


@pytest.mark.parametrize("method, num_chains, options", CHAINS)
def test_draws_and_state_are_those_of_a_plain_run(path, method, num_chains, options):
    make = partial(make_mcmc, num_chains=num_chains, chain_method=method, **options)
    whole, killed, last = make(), make(), make()
    whole.run(KEY, Y, extra_fields=FIELDS)
    # The state twice, the first draws once, and then no more.
    steps = Disk()
    with steps.mounted():
        Checkpoint(path, every=40).run(killed, KEY, Y, extra_fields=FIELDS)
    assert_identical(result(killed), result(whole))
    shutil.rmtree(path)
    disk = Disk(at=2 * len(steps.done) // 3)
    with pytest.raises(Killed), disk.mounted():
        Checkpoint(path, every=40).run(killed, KEY, Y, extra_fields=FIELDS)
    with compiled() as names:
        Checkpoint(path, every=7).run(last, KEY, Y, extra_fields=FIELDS)
    assert_identical(result(last), result(whole))
    assert jax.tree.structure(last.last_state) == jax.tree.structure(whole.last_state)
    assert sum("_loop" in name or "_advance" in name for name in names) <= 1


@cache
def unbroken():
    mcmc = make_mcmc()
    mcmc.run(KEY, Y, extra_fields=FIELDS)
    return mcmc


RUN = make_mcmc()  # compiles once


def run(path, every=40):
    Checkpoint(path, every=every).run(RUN, KEY, Y, extra_fields=FIELDS)
    return result(RUN)


@cache
def num_operations():
    with tempfile.TemporaryDirectory() as path, Disk().mounted() as disk:
        run(path)
    return tuple(disk.done)


def moments_to_fail(num):
    """Around opening, flushing and renaming, and others by chance."""
    done = num_operations()
    rare = [i for i, what in enumerate(done) if what != "write"]
    around = {*rare, *(i + 1 for i in rare[:-1])}
    chance = dice.Random(0)
    return sorted(
        {
            *chance.sample(sorted(around), min(num, len(around))),
            *chance.sample(range(len(done)), num),
        }
    )


def kill_in_turn(path, torn, num):
    for at in moments_to_fail(num):
        shutil.rmtree(path, ignore_errors=True)
        with pytest.raises(Killed), Disk(at, torn=torn).mounted():
            run(path)
        assert_identical(run(path), result(unbroken()))


@pytest.mark.parametrize(
    "torn",
    [
        pytest.param(False, id="before", marks=slow),
        pytest.param(True, id="in the middle"),
    ],
)
def test_run_killed_at_a_file_operation_goes_on(path, torn):
    kill_in_turn(path, torn, 4)


@slow
@pytest.mark.parametrize(
    "torn",
    [
        pytest.param(False, id="before", marks=slow),
        pytest.param(True, id="in the middle"),
    ],
)
def test_run_killed_at_any_file_operation_goes_on(path, torn):
    kill_in_turn(path, torn, 60)


def test_run_killed_again_and_again_ends_as_if_it_had_not_been(path):
    chance, kills = dice.Random(1), 0
    for _ in range(500):
        try:
            with Disk(chance.randrange(3, 900), torn=True).mounted():
                assert_identical(run(path, every=6), result(unbroken()))
            break
        except Killed:
            kills += 1
    assert 5 < kills < 499


def test_full_disk_ends_the_run_and_keeps_the_last_checkpoint(path):
    full = partial(OSError, errno.ENOSPC, "No space left on device")
    for at in moments_to_fail(4):
        shutil.rmtree(path, ignore_errors=True)
        with pytest.raises(OSError, match="No space left") as caught:
            with Disk(at, error=full, torn=True).mounted():
                run(path)
        assert caught.value.errno == errno.ENOSPC
        assert not [name for name in contents(path) if name.endswith(".part")]
        if (path / "state.npz").exists() and "intact" not in str(caught.value):
            # The first state was written, but perhaps not for a loss of power.
            assert storage.load(path / "state.npz")[0]["done"] == 0
        assert_identical(run(path), result(unbroken()))


def test_file_larger_than_allowed_leaves_the_old_one(path):
    resource = pytest.importorskip("resource")
    path.mkdir()
    file = path / "state.npz"
    storage.save(file, {}, {"x": np.arange(10)})
    before = contents(path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, limits[1]))
        with pytest.raises(OSError) as caught:
            storage.save(file, {}, {"x": np.arange(10**5)})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert caught.value.errno == errno.EFBIG
    assert contents(path) == before


def python(*args):
    env = {name: x for name, x in os.environ.items() if name != "XLA_FLAGS"}
    env |= {"PYTHONPATH": str(ROOT), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    env |= {"JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    command = [sys.executable, ROOT / "tests" / "killable.py", *args]
    return subprocess.Popen(command, env=env)


def kill_and_continue(path, kills):
    path.mkdir()
    plain_run = python(path / "plain.npz")
    assert plain_run.wait() == 0
    chance, seen = dice.Random(2), 0
    while True:
        process = python(path / "kept.npz", path / "run")
        state = path / "run" / "state.npz"
        before = state.stat().st_mtime_ns if state.exists() else None
        # Importing takes longer than the rest: wait for the first write.
        while process.poll() is None and seen < kills:
            if state.exists() and state.stat().st_mtime_ns != before:
                # Not so long that the run ends before the last kill.
                time.sleep(chance.uniform(0, min(0.15, 1 / kills)))
                process.kill()
                break
            time.sleep(0.001)
        if process.wait() == 0:
            break
        assert process.returncode == -signal.SIGKILL
        seen += 1
    assert seen == kills
    with np.load(path / "plain.npz") as one, np.load(path / "kept.npz") as other:
        assert_identical(dict(one), dict(other))


def test_process_killed_by_the_system_goes_on(path):
    kill_and_continue(path, 2)


@slow
def test_process_killed_by_the_system_many_times_goes_on(path):
    kill_and_continue(path, 25)


def test_interrupt_says_how_to_go_on(path):
    at = 2 * len(num_operations()) // 3
    with pytest.raises(KeyboardInterrupt, match=r"after \d+ of 112 .* is intact"):
        with Disk(at, error=KeyboardInterrupt).mounted():
            run(path)
    assert_identical(run(path), result(unbroken()))


@cache
def half_way():
    """A directory with some of a run, to be copied."""
    path = Path(tempfile.mkdtemp())
    with pytest.raises(Killed), Disk(at=4 * len(num_operations()) // 5).mounted():
        run(path)
    assert (path / "draws-000001.npz").exists()
    return path


@pytest.fixture
def begun(path):
    shutil.copytree(half_way(), path)
    return path


def assert_refused(path, *words, run=run):
    before = contents(path)
    with pytest.raises(ValueError) as caught:
        run(path)
    for word in (*words, "path"):
        assert word in str(caught.value)
    assert contents(path) == before


@pytest.mark.parametrize("name", ["state.npz", "draws-000001.npz"])
def test_damaged_file_is_refused_and_left(begun, name):
    file = begun / name
    whole = file.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:size])
        assert_refused(begun, name, "damaged", "left as it is")
    for place in dice.Random(0).sample(range(len(whole)), 20):
        flipped = bytearray(whole)
        flipped[place] ^= 16
        file.write_bytes(flipped)
        before = contents(begun)
        try:
            again = run(begun)
        except ValueError as error:
            assert name in str(error)
            assert contents(begun) == before
        else:  # the byte has no meaning, such as the time of a member
            assert_identical(again, result(unbroken()))
            shutil.rmtree(begun)
            shutil.copytree(half_way(), begun)


def foreign_files():
    text, arrays, array, pickled = (io.BytesIO() for _ in range(4))
    text.write(b"something of mine\n")
    np.savez(arrays, x=np.arange(3))
    np.save(array, np.arange(3))
    np.save(pickled, np.array({"a": 1}), allow_pickle=True)
    return [x.getvalue() for x in (text, arrays, array, pickled)]


def test_foreign_file_is_refused_and_left(begun):
    for content in foreign_files():
        (begun / "state.npz").write_bytes(content)
        assert_refused(begun, "state.npz", "no checkpoint", "left as it is")


def test_file_of_another_run_is_refused_and_left(begun):
    (begun / "draws-000001.npz").rename(begun / "draws-000002.npz")
    assert_refused(begun, "draws-000001.npz", "missing")
    shutil.copy(begun / "state.npz", begun / "draws-000001.npz")
    assert_refused(begun, "draws-000001.npz", "not the file")
    shutil.copy(begun / "draws-000002.npz", begun / "draws-000001.npz")
    storage.save(begun / "draws-000002.npz", {"run": "other"}, {})
    assert_refused(begun, "draws-000002.npz", "another run")
    shutil.copy(begun / "draws-000001.npz", begun / "state.npz")
    assert_refused(begun, "state.npz", "some of its draws")


def test_file_of_a_newer_version_is_refused_and_left(begun, monkeypatch):
    meta, tree, _ = storage.load(begun / "state.npz")
    with monkeypatch.context() as patch:
        patch.setattr(storage, "_VERSION", 2)
        storage.save(begun / "state.npz", meta, tree.build())
    assert_refused(begun, "newer version", "Upgrade")


@pytest.mark.parametrize("name", ["notes.txt", "draws-000001.npz"])
def test_directory_with_other_files_is_refused_and_left(path, name):
    path.mkdir()
    (path / name).write_text("mine")
    assert_refused(path, name, "other files")


def test_path_of_a_file_is_refused(path):
    path.write_text("mine")
    with pytest.raises(ValueError, match="is a file"):
        run(path)
    assert path.read_text() == "mine"


def test_second_process_is_refused(begun):
    pytest.importorskip("fcntl")
    with storage.locked(begun), pytest.raises(RuntimeError, match="Another run"):
        run(begun)


def other_prior(y):
    model(y, scale=2.5)


other_prior.__qualname__ = model.__qualname__


@pytest.mark.parametrize(
    "differs, kernel, options, key, y",
    [
        ("MHBT.c_n", MHBT(model, c_n=19), {}, KEY, Y),
        ("MHBT.control_variate", MHBT(model, control_variate=Taylor(1)), {}, KEY, Y),
        ("`model`", MHBT(other_prior, c_n=20), {}, KEY, Y),
        ("num_warmup", KERNEL, {"num_warmup": 51}, KEY, Y),
        ("num_samples", KERNEL, {"num_samples": 63}, KEY, Y),
        ("thinning", KERNEL, {"thinning": 2}, KEY, Y),
        ("num_chains", KERNEL, {"num_chains": 2}, random.split(KEY), Y),
        ("rng_key", KERNEL, {}, random.key(2), Y),
        ("data", KERNEL, {}, KEY, Y.at[0].add(1e-6)),
        ("data", KERNEL, {}, KEY, Y[:-1]),
        ("post_warmup_state", KERNEL, {}, KEY, Y),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_another_run_is_refused_by_name(begun, differs, kernel, options, key, y):
    mcmc = make_mcmc(kernel, **options)
    if differs == "post_warmup_state":
        mcmc.post_warmup_state = unbroken().last_state
    assert_refused(
        begun,
        differs,
        run=lambda path: Checkpoint(path).run(mcmc, key, y, extra_fields=FIELDS),
    )


def test_other_fields_and_precision_are_refused_by_name(begun, monkeypatch):
    assert_refused(begun, "extra_fields", run=lambda p: Checkpoint(p).run(RUN, KEY, Y))
    init_params = {"mu": jnp.zeros(()), "net/sd": jnp.zeros(()), "tau": jnp.zeros(())}

    def with_start(path):
        Checkpoint(path).run(RUN, KEY, Y, extra_fields=FIELDS, init_params=init_params)

    assert_refused(begun, "init_params", run=with_start)
    with jax.enable_x64(True):
        assert_refused(begun, "jax_enable_x64")


def test_legacy_key_is_the_same_seed(begun):
    mcmc = make_mcmc()
    Checkpoint(begun).run(mcmc, random.PRNGKey(1), Y, extra_fields=FIELDS)
    assert_identical(result(mcmc), result(unbroken()))


def test_complete_run_is_only_read(path):
    run(path)
    before = contents(path)
    mcmc = make_mcmc(MHBT(model, c_n=20))
    with compiled() as names:
        Checkpoint(path).run(mcmc, KEY, Y, extra_fields=FIELDS)
    assert not any("_loop" in name for name in names)
    assert_identical(result(mcmc), result(unbroken()))
    assert contents(path) == before


@pytest.mark.filterwarnings("ignore:MHBT:UserWarning")
def test_run_that_was_read_serves_like_any_other(path, capsys):
    """In a kernel that has run nothing itself."""
    run(path)
    mcmc = make_mcmc(MHBT(model, c_n=20))
    Checkpoint(path).run(mcmc, KEY, Y, extra_fields=FIELDS)
    assert str(batch_report(mcmc)) == str(batch_report(unbroken()))
    ours, theirs = to_arviz(mcmc), to_arviz(unbroken())
    assert ours["posterior"].equals(theirs["posterior"])
    assert ours["sample_stats"].equals(theirs["sample_stats"])
    mcmc.print_summary()
    ours = capsys.readouterr().out
    unbroken().print_summary()
    assert ours == capsys.readouterr().out


def test_further_draws_with_and_without_checkpoints(path):
    """From the state of a run that was read."""
    run(path / "first")
    ours, theirs = make_mcmc(MHBT(model, c_n=20)), make_mcmc()
    Checkpoint(path / "first").run(ours, KEY, Y, extra_fields=FIELDS)
    ours.post_warmup_state = theirs.post_warmup_state = ours.last_state
    key = ours.last_state.rng_key
    theirs.run(key, Y)
    Checkpoint(path / "second", every=50).run(ours, key, Y)
    assert_identical(result(ours), result(theirs))
    ours.run(key, Y)
    assert_identical(result(ours), result(theirs))


def test_progress_bar_is_one_for_the_whole_run(begun, capsys):
    mcmc = make_mcmc()
    mcmc.progress_bar = True
    Checkpoint(begun).run(mcmc, KEY, Y, extra_fields=FIELDS)
    shown = capsys.readouterr().err
    assert "112/112" in shown
    assert mcmc.sampler.get_diagnostics_str(mcmc.last_state) in shown
    assert_identical(result(mcmc), result(unbroken()))


def test_tree_comes_back_from_a_file(path):
    path.mkdir()
    key = random.key(0, impl="rbg")
    tree = {
        "a": {"b/c": jnp.arange(3, dtype=jnp.bfloat16)},
        "a/b": {"c": np.zeros((0, 2), bool)},
        "head": (1, 0.1, "x", None, True),
        "file": [np.float32(2), random.split(key)],
        "ours": Reference(jnp.ones(2)),
    }
    storage.save(path / "x.npz", {"n": [1, float("inf")]}, tree)
    meta, found, _ = storage.load(path / "x.npz")
    back = found.build()
    assert meta == {"n": [1, float("inf")]}
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert back["head"] == tree["head"]
    assert random.key_impl(back["file"][1]) == random.key_impl(key)
    for x, y in zip(jax.tree.leaves(back), jax.tree.leaves(tree), strict=True):
        if hasattr(x, "dtype"):
            assert x.dtype == y.dtype
            np.testing.assert_array_equal(plain(x), plain(y))


def test_file_cannot_name_what_to_call(path):
    path.mkdir()
    storage.save(path / "x.npz", {}, Reference(np.ones(2)))
    for name in ("os:system", "numpyro_mhbt.storage:load", "pathlib:Path"):
        code = {"type": name, "fields": {"z": 1}}
        with pytest.raises(ValueError, match="unknown type"):
            storage._decode(code, {})
    with pytest.raises(TypeError, match="cannot hold"):
        storage.save(path / "x.npz", {}, {"f": print})


def test_files_are_archives_that_numpy_reads(begun):
    with np.load(begun / "draws-000001.npz", allow_pickle=False) as file:
        assert {"z/mu", "z/net/sd", "z/ratio", "accept_prob"} <= set(file.files)
        assert "z/tau" not in file.files
        head = json.loads(file["head"].tobytes())
    assert head["format"] == "numpyro_mhbt checkpoint"
    assert zipfile.ZipFile(begun / "state.npz").testzip() is None


def test_bad_arguments_are_refused(path):
    for every in (0, -1, 1.5):
        with pytest.raises(ValueError, match="every"):
            Checkpoint(path, every=every)
    mcmc = MCMC(NUTS(model), num_warmup=1, num_samples=1, progress_bar=False)
    with pytest.raises(TypeError, match="MHBT"):
        Checkpoint(path).run(mcmc, KEY, Y)
    assert not path.exists()
