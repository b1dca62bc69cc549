"""Rows on disk give the draws of rows in memory, however they are stored."""

from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
import mmap
import os
import pickle
import threading
import time

import jax
from jax import random
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.handlers import seed, trace
from numpyro.infer import MCMC
import pytest

from numpyro_mhbt import (
    MHBT,
    DiskRows,
    RandomWalk,
    Taylor,
    full_data,
    log_likelihood,
    to_arviz,
    untemper,
)
from numpyro_mhbt.disk import _Host
from numpyro_mhbt.setup import read
from numpyro_mhbt.sources import MappedFile

N, DIM, BATCH = 2000, 3, 100


def model(x, y):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    numpyro.deterministic("first", w[0])
    with numpyro.plate("N", len(x), subsample_size=BATCH) as rows:
        logits = numpyro.subsample(x, event_dim=1) @ w
        numpyro.sample("y", dist.Bernoulli(logits=logits), obs=y[rows])


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((N, DIM))
    y = rng.uniform(size=N) < 1 / (1 + np.exp(-x @ [0.5, -0.5, 1.0]))
    return x, y.astype(np.uint8)


@pytest.fixture(scope="module")
def paths(arrays, tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    for name, array in zip("xy", arrays, strict=True):
        np.save(folder / f"{name}.npy", array)
    return folder / "x.npy", folder / "y.npy"


@pytest.fixture
def files(paths):
    return tuple(map(DiskRows, paths))


def draws(data, *, kernel=None, num_samples=30, **options):
    options = {"num_warmup": 20, "progress_bar": False, **options}
    kernel = kernel or MHBT(model, c_n=50)
    mcmc = MCMC(kernel, num_samples=num_samples, **options)
    mcmc.run(random.key(0), *data)
    return mcmc


def same_draws(arrays, files, make_kernel, **options):
    found = [
        np.asarray(draws(data, kernel=make_kernel(), **options).get_samples()["w"])
        for data in (arrays, files)
    ]
    assert len(np.unique(found[0])) > DIM
    assert np.array_equal(*found)


@pytest.mark.long_chains  # or XLA rounds a batch that it has gathered another way
@pytest.mark.filterwarnings("ignore:MHBT", "ignore:Some donated buffers")
@pytest.mark.parametrize("order", [pytest.param(0, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize(
    "chain_method",
    [
        pytest.param("vectorized", marks=pytest.mark.slow),
        "parallel",
        pytest.param("sequential", marks=pytest.mark.slow),
        pytest.param(jax.vmap, marks=pytest.mark.slow, id="vmap"),
    ],
)
def test_draws_are_those_of_arrays(arrays, files, chain_method, order):
    make_kernel = partial(MHBT, model, control_variate=Taylor(order=order), c_n=50)
    same_draws(arrays, files, make_kernel, num_chains=2, chain_method=chain_method)


@pytest.mark.filterwarnings("ignore:MHBT")
@pytest.mark.parametrize(
    "options",
    [
        {"control_variate": Taylor(order=0)},
        {"control_variate": Taylor(order=1)},
        {"control_variate": None, "proposal": RandomWalk()},
        {"num_blocks": 4},
        {"steps_per_draw": 3},
        {"on_reject": "refresh"},
    ],
    ids=str,
)
@pytest.mark.slow
def test_other_kernels(arrays, files, options):
    same_draws(arrays, files, partial(MHBT, model, c_n=50, **options))


@pytest.mark.filterwarnings("ignore:MHBT")
def test_progress_bar_and_traced_arguments(arrays, files, capsys):
    make_kernel = partial(MHBT, model, c_n=50)
    same_draws(arrays, files, make_kernel, progress_bar=True, jit_model_args=True)


def reads_of_draws(kernel, files, monkeypatch):
    """How many rows the host is asked for, call by call, in three draws of 4 chains."""
    state = kernel.init(random.split(random.key(0), 4), 50, None, files, {})
    sample = jax.jit(lambda state: kernel.sample(state, files, {}))
    calls = []
    fill = _Host._fill

    def counted(self, context, out, *rows):
        calls.append(np.shape(rows[0]))
        fill(self, context, out, *rows)

    monkeypatch.setattr(_Host, "_fill", counted)
    for _ in range(3):
        state = sample(state)
    jax.block_until_ready(state)
    return calls


@pytest.mark.slow
@pytest.mark.long_chains  # or XLA rounds a batch that it has gathered another way
@pytest.mark.filterwarnings("ignore:MHBT")
def test_shared_batches(arrays, files):
    make_kernel = partial(MHBT, model, c_n=50, share_batches=True)
    several = {"num_chains": 3, "chain_method": "vectorized"}
    same_draws(arrays, files, make_kernel, **several)


@pytest.mark.filterwarnings("ignore:MHBT")
def test_shared_batches_are_read_once(files, monkeypatch):
    calls = reads_of_draws(MHBT(model, c_n=50, share_batches=True), files, monkeypatch)
    assert [shape for shape in calls if shape[-1] == BATCH] == [(BATCH,)] * 3


@pytest.mark.filterwarnings("ignore:MHBT")
@pytest.mark.parametrize("order", [0, 2])
def test_one_call_per_step_for_all_chains_and_files(files, order, monkeypatch):
    kernel = MHBT(model, control_variate=Taylor(order=order), c_n=50)
    calls = reads_of_draws(kernel, files, monkeypatch)
    steps = [shape for shape in calls if shape == (4, BATCH)]
    others = [shape for shape in calls if shape != (4, BATCH)]
    # In warm-up two points are evaluated on each batch. Once in 100 draws the files
    # are looked at to know them again.
    assert len(steps) == 3 and set(others) <= {(64,)} and len(others) <= 2


def test_next_rows_are_read_ahead(arrays, monkeypatch):
    """And only once, by another thread."""
    monkeypatch.setattr("numpyro_mhbt.disk._LONG", -1.0)
    x, y = arrays
    by = []

    class Prompt(ThreadPoolExecutor):
        """Has read before the batch is asked for, however busy the machine is."""

        def submit(self, *call):
            found = super().submit(*call)
            wait([found])
            return found

    threads = Prompt(1, "ahead")
    monkeypatch.setattr("numpyro_mhbt.disk._workers", lambda: threads)

    class Watched(np.ndarray):
        def take(self, rows, **options):
            by.append((threading.current_thread().name, len(rows)))
            return np.asarray(self).take(rows, **options)

    def run(prefetch):
        data = DiskRows(x.view(Watched), prefetch=prefetch), y
        kernel = MHBT(model, c_n=50, control_variate=None)
        state = kernel.init(random.key(0), 0, None, data, {})
        sample = jax.jit(lambda state: kernel.sample(state, data, {}))
        by.clear()
        for _ in range(20):
            state = jax.block_until_ready(sample(state))
        reads = [name.startswith("ahead") for name, size in by if size == BATCH]
        return state.z["w"], reads

    ahead, with_prefetch = run(True)
    alone, without = run(False)
    assert np.array_equal(ahead, alone)
    # The first batch was not announced, the last never asked for.
    assert sorted(with_prefetch) == [False] + 20 * [True]
    assert without == 20 * [False]


def test_wrong_hints_do_no_harm(arrays, files, monkeypatch):
    monkeypatch.setattr("numpyro_mhbt.disk._LONG", -1.0)
    host = _Host(((files[0], 0),))
    rng = np.random.default_rng(0)
    ahead = rng.integers(0, N, 5)
    for i in range(300):
        rows = ahead if i % 3 == 0 else rng.integers(0, N, 5)
        ahead = rng.integers(0, N, 5)
        (found,) = host._find(rows, ahead)
        assert np.array_equal(found, arrays[0][rows].astype(np.float32))
    assert 0 < len(host._ahead) < 100


def make_zarr(path, x):
    zarr = pytest.importorskip("zarr")
    array = zarr.create_array(path, shape=x.shape, dtype=x.dtype, chunks=(300, DIM))
    array[:] = x
    return zarr.open_array(path, mode="r")


def arrow_table(x):
    pa = pytest.importorskip("pyarrow")
    pieces = [
        pa.table({f"x{j}": part[:, j] for j in range(DIM)}) for part in np.split(x, 4)
    ]
    return pa.concat_tables(pieces)


def write_arrow(path, table, **options):
    import pyarrow as pa

    with pa.ipc.new_file(
        path, table.schema, options=pa.ipc.IpcWriteOptions(**options)
    ) as f:
        f.write_table(table, max_chunksize=300)
    return path


def make_lists(path, x):
    pa = pytest.importorskip("pyarrow")
    lists = pa.FixedSizeListArray.from_arrays(pa.array(x.ravel()), DIM)
    table = pa.table({"y": np.zeros(len(x)), "x": lists})
    return DiskRows(write_arrow(f"{path}.arrow", table), columns="x")


def make_memmap(path, x):
    flat = np.memmap(path, x.dtype, mode="w+", offset=24, shape=(len(x) + 5, 1 + DIM))
    flat[5:, 1:] = x
    return flat[5:, 1:]


SOURCES = {
    "array": lambda path, x: x,
    "memmap": make_memmap,
    "fortran": lambda path, x: np.asfortranarray(x),
    "zarr": make_zarr,
    "zarr_path": lambda path, x: (make_zarr(f"{path}.zarr", x), f"{path}.zarr")[1],
    "table": lambda path, x: arrow_table(x),
    "table_path": lambda path, x: write_arrow(f"{path}.arrow", arrow_table(x)),
    "lists": make_lists,
}


@pytest.mark.parametrize("kind", SOURCES)
def test_every_source(kind, arrays, tmp_path):
    x, _ = arrays
    rows = SOURCES[kind](tmp_path / "rows", x)
    rows = rows if isinstance(rows, DiskRows) else DiskRows(rows)
    assert rows.shape == x.shape and len(rows) == N and rows.ndim == 2
    assert rows.dtype == jnp.float32
    expected = jnp.asarray(x)
    for index in 5, -1, slice(3, 700), slice(None, None, -400), [1999, 0, 0, -7]:
        index = np.array(index) if isinstance(index, list) else index
        assert np.array_equal(rows[index], expected[index])
    some = random.randint(random.key(0), (3, 50), -N, N)
    assert np.array_equal(jax.jit(lambda i: rows[i])(some), expected[some])
    assert rows[np.zeros(0, int)].shape == (0, DIM)
    mask = np.arange(N) % 3 == 0
    assert np.array_equal(rows[mask], expected[mask])
    if kind == "table":
        with pytest.raises(TypeError, match="by path"):
            pickle.dumps(rows)
    else:
        again = pickle.loads(pickle.dumps(rows))
        assert np.array_equal(again[10:20], expected[10:20])


def test_pickles_of_files_are_small(files):
    assert len(pickle.dumps(files)) < 2000


LAYOUTS = {
    "rows in a page": lambda x: x[:, :5],
    "rows of pages": lambda x: x,
    "columns": lambda x: np.asfortranarray(x),
    "cube": lambda x: x.reshape(len(x), 10, -1),
    "vector": lambda x: x[:, 0],
}
VIEWS = {"whole": lambda x: x, "part": lambda x: x[3:90:2], "back": lambda x: x[::-1]}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_pages_of_a_cold_file_are_asked_for_at_once(
    layout, view, tmp_path, monkeypatch
):
    x = LAYOUTS[layout](np.random.default_rng(0).standard_normal((100, 1300)))
    np.save(tmp_path / "x.npy", x)
    stored = np.load(tmp_path / "x.npy", mmap_mode="r")
    start = stored.__array_interface__["data"][0] - stored.offset
    x, stored = VIEWS[view](x), VIEWS[view](stored)
    source = DiskRows(stored)._source
    assert isinstance(source, MappedFile)
    asked = []
    monkeypatch.setattr(source, "_ask_for", lambda *bytes_: asked.append(bytes_))
    monkeypatch.setattr("numpyro_mhbt.sources._COLD", -1.0)
    rows = np.random.default_rng(1).integers(0, len(x), 7)
    assert np.array_equal(source.take(rows), x[rows])
    assert not asked  # not yet known to be cold
    assert np.array_equal(source.take(rows), x[rows])
    first_bytes = [
        stored[row, *index, ...].__array_interface__["data"][0] - start
        for row in rows
        for index in np.ndindex(x.shape[1:])
    ]
    touched = {(b + e) // mmap.PAGESIZE for b in first_bytes for e in (0, 7)}
    assert [begin // mmap.PAGESIZE for begin, _ in asked] == sorted(touched)


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="of Linux")
def test_pages_that_were_asked_for_come_to_memory(tmp_path):
    path = tmp_path / "x.npy"
    np.save(path, np.zeros((1000, 1024), np.float32))
    source = DiskRows(path)._source
    with open(path, "rb") as file:

        def is_in_memory(row):
            try:
                place = 128 + 4096 * row
                return os.preadv(file.fileno(), [bytearray(4)], place, os.RWF_NOWAIT)
            except BlockingIOError:
                return False

        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        if is_in_memory(100) or is_in_memory(900):
            pytest.skip("This system keeps files in memory.")
        source._ask_for_pages(np.array([100, 900]))
        until = time.monotonic() + 10
        while not (is_in_memory(100) and is_in_memory(900)):
            assert time.monotonic() < until
        assert not is_in_memory(500)


@pytest.mark.parametrize(
    "dtype", [np.uint8, np.float64, np.int64, np.bool_, np.float16]
)
def test_dtype_is_that_of_jax(dtype):
    x = np.arange(6).astype(dtype)
    rows, expected = DiskRows(x), jnp.asarray(x)
    assert rows.dtype == rows[:].dtype == expected.dtype
    found = jax.jit(lambda i: rows[i])(jnp.arange(6))
    assert found.dtype == expected.dtype and np.array_equal(found, expected)


@pytest.mark.filterwarnings("ignore:MHBT")
def test_passes_over_all_rows_go_by_chunks(arrays, files, monkeypatch):
    kernel = partial(MHBT, model, temperature=2, control_variate=Taylor(order=2))
    in_memory = draws(arrays, kernel=kernel(), num_samples=1000)
    on_disk = draws(files, kernel=kernel(), num_samples=1000)
    monkeypatch.setattr("numpyro_mhbt.plates._LEAST", 300)
    monkeypatch.setattr("numpyro_mhbt.plates._FEW", 3)
    most = []
    read = DiskRows.read

    def watched(self, rows):
        most.append(rows.size * (self.ndim > 1))
        return read(self, rows)

    monkeypatch.setattr(DiskRows, "read", watched)
    results = [untemper(run).samples["w"] for run in (in_memory, on_disk)]
    assert np.allclose(*results, atol=1e-5)
    samples = {"w": in_memory.get_samples()["w"][:5]}
    results = [log_likelihood(model, samples, *data)["y"] for data in (arrays, files)]
    assert results[0].shape == (5, N) and np.allclose(*results, atol=1e-5)
    found = to_arviz(on_disk, log_likelihood=True, thin=500)
    expected = to_arviz(in_memory, log_likelihood=True, thin=500)
    assert 0 < max(most) < N
    for group, name in (
        ("posterior", "w"),
        ("posterior", "first"),
        ("observed_data", "y"),
        ("log_likelihood", "y"),
    ):
        a, b = found[group][name], expected[group][name]
        assert a.dims == b.dims and np.allclose(a, b, atol=1e-5)


def test_full_data_sees_all_rows(arrays, files):
    whole = [
        trace(seed(full_data(model), 0)).get_trace(*data)["y"]
        for data in (arrays, files)
    ]
    assert whole[0]["value"].shape == (N,)
    assert np.array_equal(*(site["value"] for site in whole))
    assert np.array_equal(*(site["fn"].logits for site in whole))


def test_two_plates(tmp_path):
    table = np.random.default_rng(0).standard_normal((600, 700))

    def crossed(table, weights):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        across = numpyro.plate("columns", 700, subsample_size=20, dim=-1)
        with numpyro.plate("rows", 600, subsample_size=30, dim=-2), across:
            scale = numpyro.subsample(weights, event_dim=0)
            numpyro.sample("y", dist.Normal(mu, scale), obs=numpyro.subsample(table, 0))

    weights = np.linspace(1, 2, 700)
    same = [
        draws(data, kernel=MHBT(crossed, c_n=100)).get_samples()["mu"]
        for data in (
            (table, weights),
            (DiskRows(table), DiskRows(weights)),
        )
    ]
    assert np.array_equal(*same)


@pytest.mark.filterwarnings("ignore:MHBT. the expansion")
def test_other_file_is_noticed(arrays, files, tmp_path):
    x, y = arrays
    np.save(tmp_path / "other.npy", x + 1)
    mcmc = draws(files, kernel=MHBT(model, control_variate=Taylor(order=2), c_n=50))
    mcmc = pickle.loads(pickle.dumps(mcmc))
    mcmc.post_warmup_state = mcmc.last_state
    mcmc.num_samples = 100  # of which one looks
    mcmc.run(random.key(1), *map(DiskRows, (x, y)))  # the same numbers
    mcmc.post_warmup_state = mcmc.last_state
    with pytest.warns(UserWarning, match="other data"):
        mcmc.run(random.key(1), DiskRows(tmp_path / "other.npy"), files[1])


def test_nan_in_a_file_is_named(arrays):
    def gaussian(y):
        mu = numpyro.sample("mu", dist.Normal(0, 10))
        with numpyro.plate("N", len(y), subsample_size=BATCH) as rows:
            numpyro.sample("y", dist.Normal(mu, 1), obs=y[rows])

    y = arrays[0][:, 0].copy()
    y[1234] = np.nan
    with pytest.raises(ValueError, match=r"Site 'y' is NaN at row 1234"):
        draws((DiskRows(y),), kernel=MHBT(gaussian))


@pytest.mark.parametrize(
    "use",
    [np.asarray, jnp.asarray, jnp.sum, lambda x: jnp.ones(N) @ x, iter],
    ids=["np", "jnp", "sum", "matmul", "iter"],
)
def test_whole_reads_are_refused(use, files):
    with pytest.raises(TypeError, match=r"DiskRows.*(read whole|not iterable)"):
        use(files[0])


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda x: DiskRows("rows.csv"), ValueError, "rows.csv"),
        (lambda x: DiskRows(object()), TypeError, "object"),
        (lambda x: DiskRows(np.array(["a"])), TypeError, "numbers"),
        (lambda x: DiskRows(np.array(1.0)), TypeError, "rows of numbers"),
        (lambda x: DiskRows(x, columns="a"), ValueError, "columns"),
        (lambda x: DiskRows(x)[0, 1], TypeError, "rows alone"),
        (lambda x: DiskRows(x)[N], IndexError, str(N)),
        (lambda x: DiskRows(x)[0.5], TypeError, "row numbers"),
        (lambda x: jax.jit(lambda i: DiskRows(x)[i])(0.5), TypeError, "row numbers"),
    ],
)
def test_errors(make, error, message, arrays):
    with pytest.raises(error, match=message):
        make(arrays[0])


def test_errors_of_arrow(tmp_path):
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="1 values of 'a' are null"):
        DiskRows(pa.table({"a": [1.0, None]}))
    with pytest.raises(TypeError, match="'a' of type bool"):
        DiskRows(pa.table({"a": [True, False]}))
    table = pa.table({"a": np.zeros(1000), "b": np.zeros(1000)})
    packed = write_arrow(tmp_path / "packed.arrow", table, compression="lz4")
    with pytest.raises(ValueError, match=r"packed.arrow.*compressed"):
        DiskRows(packed)
    assert DiskRows(table, columns=["b"]).shape == (1000, 1)
    assert DiskRows(table, columns="b").shape == (1000,)


def test_rows_of_no_plate_are_named(files):
    def wrong(x):
        with numpyro.plate("N", N, subsample_size=5):
            numpyro.subsample(x, event_dim=0)

    with pytest.raises(ValueError, match=r"does not fit plate 'N' of size 2000"):
        read(wrong, files[:1], {})


def test_too_many_rows_to_count():
    def many():
        with numpyro.plate("N", 2**31, subsample_size=5):
            pass

    with pytest.raises(ValueError, match=r"plate 'N' has 2147483648 rows"):
        read(many, (), {})
