"""The summary as Markdown: the figures of the summary, and names that stay names."""

import re
from dataclasses import replace
from html import unescape

import pytest
from markdown_it import MarkdownIt

from dtprof.analysis.results import Caveat, Summary
from dtprof.analysis.run_summary import summarise
from dtprof.formatting import format_ns
from dtprof.report.text.summary_markdown import as_code, summary_markdown
from tests.analysis.noisy_runs import build_ranks
from tests.builders import MemoryRun

HOSTILE = (
    "a|b`c`\n# <img src=x onerror=alert(1)> @octocat #12 [x](http://e.org) **b** _i_ \\| ~~s~~ $m$ https://e.org &lt;"
)


@pytest.fixture(scope="module")
def summary() -> Summary:
    return summarise(MemoryRun(build_ranks(1)))


def render(markdown: str) -> str:
    """Return the HTML that a renderer of GitHub's Markdown makes of it, tags of the text included."""
    return MarkdownIt("gfm-like", {"html": True, "linkify": False}).render(markdown)


def test_tables_hold_the_figures_of_the_summary(summary: Summary) -> None:
    html = render(summary_markdown(summary))
    assert html.count("<table>") == 2
    for rank in summary.ranks:
        assert f"<td>{rank.rank}</td>\n" in html
        assert f">{format_ns(rank.step_ns)}</td>" in html
    assert summary.steps.duration_ns is not None
    assert f"<strong>{format_ns(summary.steps.duration_ns.median)} a step</strong>" in html


def test_a_bubble_that_is_not_known_is_not_0(summary: Summary) -> None:
    known, unknown = (
        replace(rank, partition_ns={**(rank.partition_ns or {}), "bubble": bubble})
        for rank, bubble in zip(summary.ranks, (7_000_000, None), strict=False)
    )
    half = replace(summary, ranks=(known, unknown))
    lines = [line.split("|") for line in summary_markdown(half).splitlines() if line.startswith("| ")]
    column = [cell.strip() for cell in lines[0]].index("bubble")
    assert [line[column].strip() for line in lines[2:5]] == ["7.00 ms", "-", "-"]


def test_hostile_names_neither_become_tags_nor_break_the_table(summary: Summary) -> None:
    rows = tuple(replace(row, group=HOSTILE, op=HOSTILE, api=HOSTILE) for row in summary.collectives)
    hostile = replace(
        summary, command=(HOSTILE,), collectives=rows, cannot_tell=(Caveat("", HOSTILE),), backend="<b>x", torch="<i>y"
    )
    html = render(summary_markdown(hostile))
    plain = render(summary_markdown(summary))
    assert re.findall(r"<(\w+)", html).count("td") == re.findall(r"<(\w+)", plain).count("td")
    for tag in ("<img", "<a ", "<em", "<b>", "<i>", "<s>", "<h1"):
        assert tag not in html
    outside = re.sub(r"<code>.*?</code>", "", html, flags=re.DOTALL)
    assert "@octocat" not in outside
    assert "e.org" not in outside


def test_a_name_is_read_back_as_it_was() -> None:
    rendered = render(as_code(HOSTILE))
    assert unescape(rendered.removeprefix("<p><code>").removesuffix("</code></p>\n")) == " ".join(HOSTILE.split())
