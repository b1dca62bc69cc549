"""The example in the README runs as it stands."""

from pathlib import Path
import re


def test_example(capsys, monkeypatch):
    monkeypatch.setenv("CI", "true")  # NumPyro then draws no progress bar
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    assert "r_hat" in capsys.readouterr().out
