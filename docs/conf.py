"""How Sphinx builds the documentation site: `make site`.

The pages are Markdown that reads on a code host as well. They use no directives: links are relative
paths, and a link to a heading names the anchor that code hosts give it. The navigation follows the map in
`docs/index.md`.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx

from dtprof import __version__

MAP = Path(__file__).with_name("index.md")
API = "docs/reference/python-api"
# What a page of the site has beyond its Markdown: the signatures and docstrings that the Python API documents.
SIGNATURES = """
## Signatures

```{eval-rst}
.. autofunction:: dtprof.step
.. autofunction:: dtprof.phase
.. autofunction:: dtprof.open_run
.. autofunction:: dtprof.log_to
.. autofunction:: dtprof.api.schema
.. autoclass:: dtprof.api.Run
   :members:
.. automodule:: dtprof.interchange.public_tables.table
   :members: Table, Column
.. automodule:: dtprof.diagnosis.findings
   :members: Verdict, Finding
.. automodule:: dtprof.analysis.results
   :members:
.. automodule:: dtprof.errors
   :members:
```
"""

project = "dtprof"
author = "The dtprof authors"
version = release = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
# The sources are the repository's Markdown, read from its root, so that links out of docs/ lead to pages as well.
root_doc = "README"
include_patterns = [
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "docs/**.md",
    "reference_trainer/README.md",
    "tests/*/README.md",
]
exclude_patterns = [".*", "dtprof", "benchmarks", "dtprof-runs", "gpu-figures", "build", "dist"]
myst_heading_anchors = 6
myst_enable_extensions = ["html_image"]
html_theme = "furo"
html_title = f"dtprof {version}"
# Lines of 100 columns, as commands print them, fit the width of a page.
html_theme_options = {"light_css_variables": {"code-font-size": "73%"}}
add_module_names = False
autodoc_member_order = "bysource"


def toctree(*entries: str, caption: str = "") -> str:
    """Return a hidden table of contents, with a caption where one is given, in MyST's syntax."""
    options = [":hidden:", ":glob:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["", "```{toctree}", *options, "", *entries, "```", ""])


def navigation(page: str) -> str:
    """Return the navigation: the pages that the map links to, in its order, under the names of its parts."""
    trees = [toctree("docs/index", "reference_trainer/README", "CHANGELOG", "CONTRIBUTING", "tests/*/README")]
    for part in re.split(r"^(?=\*\*)", page, flags=re.MULTILINE)[1:]:
        linked = re.findall(r"\]\(((?!\.\.)[\w./-]+)\.md(?:#[\w-]*)?\)", part)
        caption = part[2 : part.index("**", 2)].rstrip(".")
        trees.append(toctree(*(f"docs/{link}" for link in dict.fromkeys(linked)), caption=caption))
    return "".join([*trees, toctree("docs/explanation/measurements/*", caption="Measured")])


def _extend_page(_app: Sphinx, name: str, source: list[str]) -> None:
    if name == root_doc:
        source[0] += navigation(MAP.read_text(encoding="utf-8"))
    if name == API:
        source[0] += SIGNATURES


def setup(app: Sphinx) -> None:
    """Add to the pages of the site what their Markdown leaves out."""
    app.connect("source-read", _extend_page)
