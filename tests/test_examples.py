"""Every example runs, on little data, and saves its picture."""

from pathlib import Path
import subprocess
import sys

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
WITH_SMOKE = sorted(p for p in EXAMPLES.glob("*.py") if "--smoke" in p.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_SMOKE, ids=lambda path: path.stem)
def test_runs_in_seconds(path, tmp_path):
    result = subprocess.run(
        [sys.executable, path, "--smoke", "--out", "picture.png"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "picture.png").stat().st_size > 10_000
