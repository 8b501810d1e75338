"""Pages as data: what is found, and how a broken file is refused."""

import re
from pathlib import Path

import pytest

from dtprof.errors import UsageError
from dtprof.report.pages.html_file import SCRIPTS
from dtprof.report.pages.page_dashboard import (
    NEEDS,
    dashboard_names,
    dashboards_folder,
    load_dashboard,
    load_report,
    name_apart,
)
from dtprof.report.pages.page_panels import panel_names


def load(tmp_path: Path, text: str) -> str:
    """Return the message with which a page is refused."""
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as refused:
        load_dashboard(str(path), panel_names())
    return str(refused.value).replace(str(path), "mine.toml")


@pytest.mark.parametrize("name", dashboard_names())
def test_every_shipped_page_loads_and_explains_its_panels(name: str) -> None:
    dashboard = load_dashboard(name, panel_names())
    assert dashboard.title
    assert dashboard.question
    assert len({panel.anchor for panel in dashboard.panels}) == len(dashboard.panels)
    assert all(panel.title for panel in dashboard.panels)


def test_every_panel_is_on_a_shipped_page_and_anchors_are_unique() -> None:
    pages = load_report(panel_names(), available=NEEDS)
    panels = [panel for page in pages for panel in page.panels]
    assert {panel.name for panel in panels} == set(panel_names())
    assert len({panel.anchor for panel in panels}) == len(panels)


def test_pages_come_in_their_order_and_without_those_that_have_nothing_to_show() -> None:
    everything = [page.name for page in load_report(panel_names(), available=NEEDS)]
    assert everything[:3] == ["overview", "hang", "changes"]
    assert set(everything) - {page.name for page in load_report(panel_names())} == {"hang", "comparison"}


def test_a_panel_that_two_pages_have_is_called_after_its_page_the_second_time() -> None:
    pages = name_apart([load_dashboard(name, panel_names()) for name in ("overview", "collectives", "collectives")])
    anchors = [panel.anchor for page in pages for panel in page.panels if panel.name == "bandwidth"]
    assert anchors == ["bandwidth", "collectives-bandwidth", "collectives-bandwidth-2"]


def test_template_style_and_script_lie_beside_the_pages() -> None:
    assert {"page.html", "style.css", *SCRIPTS} <= {path.name for path in dashboards_folder().iterdir()}


def test_a_page_of_the_user_is_loaded_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('title = "Mine"\n[[panels]]\npanel = "timeline"\n[[panels]]\npanel = "timeline"\ntitle = "Again"\n')
    dashboard = load_dashboard(str(path), panel_names())
    assert [(panel.anchor, panel.title) for panel in dashboard.panels] == [
        ("timeline", "Timeline"),
        ("timeline-2", "Again"),
    ]


def test_an_unknown_name_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"--dashboard 'overvew' is not known; expected one of .*overview"):
        load_dashboard("overvew", panel_names())


def test_a_name_cannot_leave_the_folder() -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        load_dashboard("../pyproject", panel_names())


def test_a_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.toml.*No such file"):
        load_dashboard(str(tmp_path / "none.toml"), panel_names())


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="cannot be read"):
        load_dashboard(str(path), panel_names())


def test_broken_toml_names_the_line(tmp_path: Path) -> None:
    message = load(tmp_path, 'title = "Mine"\n[[panels]\n')
    assert message.startswith("mine.toml is not valid TOML:")
    assert "line 2" in message


def test_an_unknown_panel_names_the_line_and_the_valid_ones(tmp_path: Path) -> None:
    message = load(tmp_path, '[[panels]]\npanel = "timeline"\n\n[[panels]]\npanel = "bubles"\n')
    assert message.startswith(
        "mine.toml, line 5: unknown panel 'bubles'; expected one of bandwidth, before_after, blame,"
    )


def test_pages_of_one_name_have_addresses_of_their_own() -> None:
    page = load_dashboard("overview", panel_names())
    assert [one.name for one in name_apart([page, page])] == ["overview", "overview-2"]


def test_what_is_wrong_in_a_later_panel_has_its_line_not_that_of_an_earlier_one(tmp_path: Path) -> None:
    first = 'title = "Mine"\n[[panels]]\npanel = "timeline"\ntitle = "One"\n[[panels]]\n'
    assert load(tmp_path, first + 'panel = "pipeline"\ntitle = 3\n').startswith("mine.toml, line 7: title is 3")
    assert load(tmp_path, first + 'title = "Two"\n').startswith("mine.toml, line 5: a [[panels]] names no panel")
    assert load(tmp_path, first + 'panel = ["pipeline"]\n').startswith("mine.toml, line 6: unknown panel ['pipeline']")


def test_an_unknown_key_names_the_line(tmp_path: Path) -> None:
    message = load(tmp_path, '[[panels]]\npanel = "timeline"\nhlep = "x"\n')
    assert message == "mine.toml, line 3: unknown key 'hlep'; expected definitions, help, panel, question, title"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has no panels; expected at least one [[panels]]"),
        ('title = "x"\npanels = []', "line 2: panels is []; expected at least one [[panels]] with panel = one of"),
        ("panels = 3", "line 1: panels is 3"),
        ("panels = [3]", "line 1: panels is [3]"),
        ('[panels]\npanel = "timeline"', "line 1: panels is {'panel': 'timeline'}; expected at least one [[panels]]"),
        ('title = ""\n[[panels]]\npanel = "timeline"', "line 1: title is empty; expected a text"),
        ('title = "x"\n[[panels]]\npanel = "timeline"\ntitle = " "', "line 4: title is empty"),
        (
            '[[panels]]\npanel = "exposed_by_axis"\n[panels.definitions]\nwait = "x"\nwiat = "y"',
            "line 5: unknown name 'wiat' in the definitions of exposed_by_axis; expected exposed, transfer, wait",
        ),
        (
            '[[panels]]\npanel = "exposed_by_axis"\ndefinitions = { wait = "x", "wiat" = "y" }',
            "line 3: unknown name 'wiat' in the definitions of exposed_by_axis",
        ),
        (
            '[[panels]]\npanel = "timeline"\ndefinitions.bar = "y"',
            "line 3: unknown name 'bar' in the definitions of timeline; this panel has none; say it in help",
        ),
        ('[[panels]]\ntitle = "x"', "a [[panels]] names no panel"),
        ("[[panels]]\npanel = 3", "line 2: unknown panel 3"),
        ('order = "x"\n[[panels]]\npanel = "timeline"', "line 1: order is 'x'; expected a whole number"),
        ('needs = "x"\n[[panels]]\npanel = "timeline"', "line 1: needs is 'x'; expected one of finding, comparison"),
        ('title = 3\n[[panels]]\npanel = "timeline"', "line 1: title is 3; expected a text in quotes"),
        ('[[panels]]\npanel = "timeline"\ndefinitions = 3', "line 3: definitions of panel 'timeline' are not texts"),
        ('[[panels]]\npanel = "timeline"\n[panels.definitions]\nx = 3', "line 3: definitions of panel 'timeline'"),
    ],
)
def test_other_mistakes_are_named(tmp_path: Path, text: str, words: str) -> None:
    assert words in load(tmp_path, text)


DOCUMENT = Path(__file__).parents[2] / "docs" / "reference" / "dashboards.md"


def test_the_documented_page_loads_and_the_documented_panels_are_all_there_are(tmp_path: Path) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    example = tmp_path / "communication.toml"
    example.write_text(text.partition("```toml")[2].partition("```")[0])
    assert load_dashboard(str(example), panel_names()).title == "Communication"
    listed = re.findall(r"^\| `(\w+)` \|", text.partition("## Panels")[2], re.MULTILINE)
    assert sorted(listed) == sorted(panel_names())
