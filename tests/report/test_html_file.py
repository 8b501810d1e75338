"""The page is one file: complete, small, without a link to the network, written atomically."""

import base64
import gzip
import hashlib
import json
import os
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from dtprof.analysis.results import CallLine, GroupResult, Summary
from dtprof.errors import OutputError
from dtprof.report.figures.drawing import Drawing
from dtprof.report.figures.figure_registry import FIGURES
from dtprof.report.figures.figure_source import Source
from dtprof.report.pages.html_file import is_own_report, render_html, write_html
from dtprof.report.pages.page_dashboard import Dashboard, load_dashboard, load_report
from dtprof.report.pages.page_markup import Markup, element, join
from dtprof.report.pages.page_panels import panel_names, render_documents
from tests.report.example_closeups import hang_of, source_of
from tests.report.example_summaries import empty_summary, summary_of


def pages_of(source: Source) -> tuple[Dashboard, ...]:
    return load_report(panel_names(), available=source.available)


def render(summary: Summary) -> str:
    return render_all(Source(summary=summary))


def render_all(source: Source) -> str:
    return render_html(source, pages_of(source))


def unpack(page: str, name: str) -> str:
    found = re.search(rf'<script type="text/plain" id="{name}">([^<]*)</script>', page)
    assert found
    return gzip.decompress(base64.b64decode(found[1])).decode()


class Links(HTMLParser):
    """Collects what a browser would fetch or follow."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if (tag, dict(attrs).get("href")) == ("link", "data:,"):
            return  # no icon: the browser would ask a server for one
        self.found += [value or "" for name, value in attrs if name in ("href", "src", "srcset", "action", "data")]
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        assert not [name for name, _ in attrs if name.startswith("on")]


def test_nothing_in_the_page_leads_out_of_it() -> None:
    page = render(summary_of())
    links = Links()
    links.feed(page)
    assert links.found
    assert all(link.startswith("#") for link in links.found)
    style = re.search(r"<style>(.*?)</style>", page, re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]


def test_every_link_has_its_target() -> None:
    page = render(summary_of())
    links = Links()
    links.feed(page)
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links.found} <= set(ids)


def test_the_policy_forbids_everything_but_the_script_of_the_page() -> None:
    page = render(summary_of())
    script = re.search(r"<script>(.*?)</script>", page, re.DOTALL)
    assert script
    digest = base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode()
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    assert policy[1].startswith("default-src &#x27;none&#x27;; ")
    assert f"sha256-{digest}" in policy[1]
    assert "unsafe-eval" not in policy[1]
    assert page.index("Content-Security-Policy") < page.index("<style>")


def test_plotly_is_inside_as_installed() -> None:
    from plotly.offline import get_plotlyjs

    assert unpack(render(summary_of()), "plotly") == get_plotlyjs()


def test_figures_are_inside_by_panel() -> None:
    source = source_of()
    drawings = json.loads(unpack(render_all(source), "figures"))
    kinds = {anchor: next(iter(drawing)) for anchor, drawing in drawings.items()}
    panels = [panel for page in pages_of(source) for panel in page.panels if panel.name in FIGURES]
    drawn = {panel.anchor: "plotly" for panel in panels if isinstance(FIGURES[panel.name](source), Drawing)}
    assert len(drawn) > 15
    assert kinds == drawn | {"rank-grid": "grid", "run-timeline": "tracks"}


def test_the_headline_links_to_no_panel_that_is_not_on_the_page(tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('[[panels]]\npanel = "headline"\n')
    page = render_html(Source(summary=summary_of()), [load_dashboard(str(mine), panel_names())])
    assert "Show the evidence" not in page
    assert "plotly.js v" not in page
    assert len(page) < 100_000


def test_the_same_run_gives_the_same_file() -> None:
    assert render_all(source_of()) == render_all(source_of())


@pytest.mark.parametrize(("num_ranks", "num_steps"), [(8, 1000), (64, 1000)])
def test_the_file_stays_under_four_megabytes(num_ranks: int, num_steps: int) -> None:
    assert len(render_all(source_of(num_ranks=num_ranks, num_steps=num_steps)).encode()) <= 4_000_000


def test_a_run_with_nothing_to_draw_needs_no_plotly_and_says_why_in_each_panel() -> None:
    page = render(empty_summary())
    assert len(page) < 160_000
    drawn_or_said = page.count('<section id="') and len(re.findall(r'class="panel panel-', page))
    always = {"headline", "key-figures", "cannot-tell", "measurement", "page-links", "next-commands"}
    assert page.count('class="nothing"') == drawn_or_said - len(always)
    assert 'class="plot"' not in page


def test_names_of_the_run_are_text() -> None:
    evil = "<script>alert(1)</script>"
    summary = summary_of()
    collectives = tuple(replace(collective, group=evil, op=evil, api=evil) for collective in summary.collectives)
    page = render(replace(summary, run=evil, command=(evil,), hosts=(evil,), collectives=collectives))
    assert evil not in page
    assert page.count("<script") == 4
    assert evil not in render_all(source_of(verdict=hang_of(evil)))


def test_a_name_that_is_no_valid_text_is_written_all_the_same(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    summary = replace(summary_of(), command=("train-\udcff\0.py",))
    source = Source(summary=summary)
    write_html(source, pages_of(source), output, force=False)
    assert "train-\\udcff" in output.read_text(encoding="utf-8")


def test_nothing_is_overwritten_unless_forced(tmp_path: Path) -> None:
    output, source = tmp_path / "page.html", Source(summary=empty_summary())
    pages = pages_of(source)
    output.write_text("mine")
    with pytest.raises(OutputError, match=r"page\.html exists; give --force"):
        write_html(source, pages, output, force=False)
    assert output.read_text() == "mine"
    assert not is_own_report(output)
    write_html(source, pages, output, force=True)
    assert is_own_report(output)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_a_folder_that_is_missing_or_a_directory_in_the_way_is_named(tmp_path: Path) -> None:
    source = Source(summary=empty_summary())
    pages = pages_of(source)
    with pytest.raises(OutputError, match=r"none/page\.html cannot be written \(No such file or directory\)"):
        write_html(source, pages, tmp_path / "none" / "page.html", force=False)
    with pytest.raises(OutputError, match="is a directory"):
        write_html(source, pages, tmp_path, force=True)


def test_a_full_disk_leaves_no_half_page(tmp_path: Path) -> None:
    if not os.access("/dev/full", os.W_OK):
        pytest.skip("this system has no /dev/full")
    output = tmp_path / "page.html"
    (tmp_path / f".page.html.{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OutputError, match="No space left on device"):
        write_html(Source(summary=empty_summary()), load_report(panel_names()), output, force=False)
    assert list(tmp_path.iterdir()) == []


def test_markup_escapes_what_is_not_markup() -> None:
    assert element("p", "a < b", element("b", "&"), title='"x"', class_=None, data_value="1") == (
        '<p title="&quot;x&quot;" data-value="1">a &lt; b<b>&amp;</b></p>'
    )
    assert join("<", Markup("<br>")) == "&lt;<br>"
    assert element("br") == "<br>"


def test_groups_of_one_description_are_distinguished() -> None:
    summary = summary_of(num_ranks=4)
    groups = tuple(
        GroupResult(name=name, description=description, ranks=(0, 1), axis=None)
        for name, description in (("0", "mesh_dp"), ("1", "mesh_dp"), ("2", ""))
    )
    collectives = tuple(replace(summary.collectives[0], group=name) for name in ("0", "1", "2", "gone"))
    page = render(replace(summary, groups=groups, collectives=collectives, call_sites=(), message_sizes=()))
    cells = re.findall(r"<td><bdi>all_reduce</bdi></td><td><bdi>([^<]*)</bdi>", page)
    assert cells == 2 * ["mesh_dp (0)", "mesh_dp (1)", "2", "gone"]


def test_1024_ranks_fit_in_twelve_megabytes() -> None:
    assert len(render_all(source_of(num_ranks=1024, num_steps=100)).encode()) <= 12_000_000


def test_what_is_drawn_and_what_is_served_are_the_same_documents() -> None:
    source = source_of()
    documents = render_documents(source, pages_of(source))
    drawings = json.loads(unpack(render_all(source), "figures"))
    assert {anchor: document.drawing for anchor, document in documents.items() if document.drawing} == drawings
    assert json.loads(json.dumps(drawings)) == drawings


def test_call_sites_of_one_line_are_told_apart_by_their_callers() -> None:
    summary = summary_of(num_ranks=4)
    at = CallLine(file="/home/me/tools.py", line=7, function="average")
    callers = [CallLine(file="/home/me/train.py", line=line, function="train") for line in (20, 30)]
    sites = tuple(replace(summary.call_sites[0], line=replace(at, caller=caller)) for caller in callers)
    page = render(replace(summary, call_sites=sites))
    cells = re.findall(r"<td><bdi>tools.py:7 in average</bdi></td><td><bdi>([^<]*)</bdi>", page)
    assert cells == ["train.py:20", "train.py:30"]
