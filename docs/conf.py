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
# Or `--json` in a sentence becomes a dash and `json`.
smartquotes = False
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
    trees = [toctree("docs/index")]
    for part in re.split(r"^(?=\*\*)", page, flags=re.MULTILINE)[1:]:
        linked = re.findall(r"\]\(((?!\.\.)[\w./-]+)\.md\)", part)
        caption = part[2 : part.index("**", 2)].rstrip(".")
        trees.append(toctree(*(f"docs/{link}" for link in dict.fromkeys(linked)), caption=caption))
    trees.append(toctree("docs/explanation/decisions/*", caption="Decided"))
    trees.append(toctree("docs/explanation/measurements/*", caption="Measured"))
    changing = ("CONTRIBUTING", "CHANGELOG", "reference_trainer/README", "tests/*/README")
    return "".join([*trees, toctree(*changing, caption="Change dtprof")])


def pictures_of_both_themes(page: str, folder: Path) -> str:
    """Return a page, its pictures doubled where a dark one lies beside the light one: the theme shows one of them."""

    def doubled(match: re.Match[str]) -> str:
        path, width, text = match["path"] or match["src"], match["width"] or "100%", match["text"] or match["alt"]
        if not (folder / f"{path}-dark.png").exists():
            return match[0]
        pair = {"only-light": path, "only-dark": f"{path}-dark"}
        return "".join(
            f'<img src="{src}.png" class="{name}" width="{width}" alt="{text}">' for name, src in pair.items()
        )

    html = r'<img src="(?P<src>[^"]+)\.png" width="(?P<width>\d+)" alt="(?P<alt>[^"]*)">'
    return re.sub(rf"!\[(?P<text>[^]]*)\]\((?P<path>[^)]+)\.png\)|{html}", doubled, page)


def _extend_page(app: Sphinx, name: str, source: list[str]) -> None:
    source[0] = pictures_of_both_themes(source[0], Path(app.srcdir, name).parent)
    if name == root_doc:
        source[0] += navigation(MAP.read_text(encoding="utf-8"))
    if name == API:
        source[0] += SIGNATURES


def _write_index(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        index = '<!DOCTYPE html><title>dtprof</title><meta http-equiv="refresh" content="0; url={}.html">\n'
        Path(app.outdir, "index.html").write_text(index.format(root_doc), encoding="utf-8")


def setup(app: Sphinx) -> None:
    """Add what the Markdown leaves out, and the page that a server opens first."""
    app.connect("source-read", _extend_page)
    app.connect("build-finished", _write_index)
