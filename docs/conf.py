"""How Sphinx builds these pages: ``sphinx-build -W -n docs docs/_build/html``."""

import re

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

import numpyro_mhbt

project = "numpyro_mhbt"
copyright = "the authors of numpyro_mhbt"
release = version = numpyro_mhbt.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest"]
exclude_patterns = ["_build", "benchmarks"]
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "none"
# Names of other packages: their pages are not at hand while building.
nitpick_ignore_regex = [
    ("py:.*", r"(numpyro|jax|collections|typing)\..*"),
    ("py:.*", r"str|int|float|bool|dict|Callable"),
]

html_theme = "furo"
html_title = f"numpyro_mhbt {release}"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_copy_source = False
html_show_sphinx = False


def inline_math(writer, node: nodes.math) -> None:
    writer.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block_math(writer, node: nodes.math_block) -> None:
    formula = convert(node.astext(), display="block")
    writer.body.append(f'<div class="math">{formula}</div>')
    raise nodes.SkipNode


def mark_numbers(app: Sphinx, page: nodes.document) -> None:
    """Cells that a phone should not break, such as 3.2e-5 or 2.42 (0.04) / 2.34."""
    for cell in page.findall(nodes.entry):
        if re.fullmatch(r"[-+\d.e(<>=/) %]+", cell.astext()):
            cell["classes"].append("number")


def setup(app: Sphinx) -> None:
    app.connect("doctree-read", mark_numbers)
    # MathML, which browsers show by themselves: no script, and nothing to fetch.
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.config.html_math_renderer = "mathml"
