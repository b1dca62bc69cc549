"""Every example runs, on little data, and saves its pictures."""

import io
from pathlib import Path
import subprocess
import sys
import tarfile

from jax import random
import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
COMMANDS = [
    [path.name]
    for path in sorted(EXAMPLES.glob("*.py"))
    if "__main__" in path.read_text()
]
COMMANDS += [["mixtures.py", "--family", "poisson"]]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_runs_in_seconds(command, tmp_path):
    name, *options = command
    result = subprocess.run(
        [sys.executable, EXAMPLES / name, "--smoke", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    sizes = [path.stat().st_size for path in tmp_path.glob("*.png")]
    assert sizes and min(sizes) > 5000


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:MHBT")
def test_trainers_see_the_same_batches(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    from mnist import Network
    from training import Task, batch_stream, first_weights, made_up, start_mhbt

    x, y, *test = map(jnp.asarray, made_up(784))
    task = Task(Network(4), (x, y), tuple(test), 0.1, 0.1, "softmax", 20)
    weights = first_weights(random.key(3), task)
    epoch, state = start_mhbt(task, weights, 3, rate=0.1, c_n=10.0)
    key = random.split(random.key(3), 3)[0]
    for _ in range(2):
        state, _ = epoch(state, task.train)
        for _ in range(len(y) // task.batch_size):
            key, rows = batch_stream(key, len(y), task.batch_size)
        key = random.split(key)[0]
        assert np.array_equal(state.batch["N"], rows)


def test_cifar10_archive(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(EXAMPLES)
    from datasets import cifar10_archive

    image = np.random.default_rng(0).integers(0, 256, (2, 32, 32, 3), np.uint8)
    path = tmp_path / "cifar.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name, label in ("data_batch_1", 3), ("data_batch_2", 5), ("test_batch", 7):
            planes = image.transpose(0, 3, 1, 2).reshape(2, -1)
            rows = np.concatenate([np.full((2, 1), label, np.uint8), planes], 1)
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}.bin")
            member.size = rows.size
            archive.addfile(member, io.BytesIO(rows.tobytes()))
    x, y, x_test, y_test = cifar10_archive(path)
    assert y.tolist() == [3, 3, 5, 5] and y_test.tolist() == [7, 7]
    assert np.array_equal(x[2:], image) and np.array_equal(x_test, image)
