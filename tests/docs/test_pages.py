"""Pages: links lead somewhere, commands can be typed, and no page lies alone."""

import pytest

from dtprof.cli.main import build_parser
from reference_trainer.options import parse_options
from reference_trainer.placement import Placement
from tests.docs import report_images
from tests.docs.pages import Page, all_pages, load

PAGES = all_pages()


def names(page: Page) -> str:
    return page.name


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_every_link_leads_to_a_file_and_a_heading_that_exist(page: Page) -> None:
    for link in page.links():
        target, _, anchor = link.partition("#")
        path = (page.path.parent / target).resolve() if target else page.path
        assert path.exists(), f"{page.name} links to {link}"
        if anchor:
            assert anchor in load(str(path)).anchors(), f"{page.name} links to {link}"


def dtprof_commands() -> list[tuple[str, list[str]]]:
    """Return every dtprof command of the pages, by page, without the path it is typed with."""
    found = [(page.name, words) for page in PAGES for words in page.commands()]
    return [(name, words[1:]) for name, words in found if words and words[0].rpartition("/")[2] == "dtprof"]


@pytest.mark.parametrize(("page", "words"), dtprof_commands(), ids=lambda value: str(value))
def test_every_dtprof_command_shown_is_understood(page: str, words: list[str]) -> None:
    cut = words.index("--") if "--" in words else len(words)
    parsed = build_parser().parse_args(words[:cut])  # exits where it is not
    if parsed.command == "run":
        assert words[cut + 1 :], f"{page} shows dtprof run without a command"


def trainer_options() -> list[list[str]]:
    """Return the options of every reference trainer that the README and docs start below dtprof."""
    shown = [words for _, words in dtprof_commands() if "reference_trainer" in words]
    return [words[words.index("reference_trainer") + 1 :] for words in shown]


@pytest.mark.parametrize("options", trainer_options(), ids=" ".join)
def test_every_option_of_the_trainer_shown_is_understood(options: list[str]) -> None:
    assert options
    parse_options(options, Placement(world_size=4, launched=True))


def test_every_page_of_the_documentation_is_in_its_map() -> None:
    index, decisions = load("docs/index.md"), load("docs/explanation/decisions.md")
    maps = [(page.path.parent, page.links()) for page in (index, decisions)]
    linked = {(folder / link.partition("#")[0]).resolve() for folder, links in maps for link in links}
    linked |= {page.path for page in PAGES if page.path.parent.name == "measurements"}  # cited where they are used
    missing = [page.name for page in PAGES if page.name.startswith("docs/") and page.path not in linked | {index.path}]
    assert missing == []


def test_readme_begins_with_the_two_commands() -> None:
    first_screen = "\n".join(load("README.md").text.splitlines()[:25])
    assert "make demo" in first_screen
    assert "make test" in first_screen


@pytest.mark.parametrize("page", PAGES, ids=names)
def test_no_page_names_a_folder_of_the_machine_it_was_written_on(page: Page) -> None:
    if not page.name.startswith("reference_trainer/"):
        assert "/root/" not in page.text
        assert "/home/" not in page.text.replace("/home/user/train/", "")  # where the stored runs were recorded


def test_every_picture_is_one_that_the_script_renders() -> None:
    rendered = {report_images.image_path(name, dark=dark) for name in report_images.VIEWS for dark in (False, True)}
    assert rendered == set(report_images.FOLDER.iterdir())
