"""The example in the README runs as it stands."""

from pathlib import Path
import re


def test_example(capsys, monkeypatch):
    monkeypatch.setenv("CI", "true")  # NumPyro then draws no progress bar
    text = (Path(__file__).parent.parent / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(code, {})
    printed = capsys.readouterr().out
    assert "r_hat" in printed
    assert "T = 1: the draws are those of the posterior." in printed
