"""Pages show what commands print of stored runs, not what was once pasted."""

import pytest

from tests.docs.embedded_transcripts import filled, shown_commands
from tests.docs.pages import Page, all_pages, load

PAGES = [page for page in all_pages() if shown_commands(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_output_shown_of_a_stored_run_is_what_the_command_prints(page: Page) -> None:
    assert page.text == filled(page), "stale: python -m tests.docs.embedded_transcripts"


def test_readme_and_tutorial_show_a_summary_and_a_verdict_of_stored_runs() -> None:
    for name in ("README.md", "docs/tutorial/first-run.md"):
        assert {"dtprof summary ddp", "dtprof diagnose skipped"} <= set(shown_commands(load(name)))
