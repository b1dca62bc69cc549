"""The pages say what is so: their code runs, their quotes and links are real."""

import ast
from pathlib import Path
import re

import pytest

import numpyro_mhbt

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [
    *sorted(DOCS.rglob("*.md")),
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")),
]
BLOCK = re.compile(r"^```(python|text)\n(.*?)^```", re.DOTALL | re.MULTILINE)
NUMBER = re.compile(r"(-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize(
    "page", [p for p in PAGES[:-3] if "```python" in p.read_text()], ids=name_of
)
def test_code_runs_and_prints_what_is_shown(page, capsys, monkeypatch):
    monkeypatch.setenv("CI", "true")  # NumPyro then draws no progress bar
    names: dict = {}
    printed = ""
    for kind, text in BLOCK.findall(page.read_text()):
        if kind == "python":
            exec(text, names)
            printed = capsys.readouterr().out
        else:
            shown, found = NUMBER.split(text), NUMBER.split(printed)
            assert shown[::2] == found[::2], printed
            # Rounding sends chains other ways.
            numbers = [float(x) for x in found[1::2]]
            assert [float(x) for x in shown[1::2]] == pytest.approx(numbers, rel=0.2)


def anchors(page):
    """Of the headings, as GitHub and MyST make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for title in re.findall(r"^#+ (.*)$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_in_commands_exist(page):
    text = page.read_text()
    for path in re.findall(r"\b(?:examples|benchmarks|tests)/\w+\.py", text):
        assert (ROOT / path).exists(), path


def test_named_tests_exist():
    tests = "".join(path.read_text() for path in (ROOT / "tests").glob("*.py"))
    for name in re.findall(r"`(test_\w+)`", (DOCS / "theory.md").read_text()):
        assert f"def {name}(" in tests, name


def test_quoted_messages_are_those_of_the_source():
    """``…`` stands for what is put in."""
    said = []
    for path in (ROOT / "numpyro_mhbt").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(part, "value", "") for part in node.values]
                said += [p if isinstance(p, str) else "\0" for p in parts] + ["\n"]
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said += [node.value, "\n"]
    source = "".join(said)
    quotes = re.findall(
        r"(?:^> .*\n)+", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert quotes
    for quote in quotes:
        text = quote.replace("> ", "").replace("\n", " ").strip()
        for part in text.split("…"):
            assert part.strip() in source, part


def test_every_public_name_has_its_place_in_the_api():
    listed = re.findall(
        r"auto\w+:: (?:numpyro_mhbt\.)?(\w+)", (DOCS / "api.md").read_text()
    )
    assert set(numpyro_mhbt.__all__) <= set(listed)
