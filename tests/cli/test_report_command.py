"""`dtprof report` from a run on disk to a file."""

import subprocess
import sys
from pathlib import Path

import pytest

from dtprof.cli import report
from dtprof.cli.parsers import CommandParser
from dtprof.errors import NotARunError, OutputError, UsageError
from tests.builders import RankBuilder, write_run

MS = 1_000_000


@pytest.fixture
def run_directory(tmp_path: Path) -> Path:
    """Two ranks, four steps of 100 ms; rank 1 is late by 20 ms at every all_reduce."""
    ranks = [RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)]
    for step in range(4):
        begin = step * 100 * MS
        for rank, late in zip(ranks, (0, 20 * MS), strict=True):
            rank.span("forward", begin + 5 * MS, begin + 30 * MS)
            rank.span("backward", begin + 30 * MS, begin + 90 * MS)
            rank.op("all_reduce", begin + 50 * MS + late, begin + 80 * MS, nbytes=2**20, api="ddp")
            rank.span("optimizer", begin + 90 * MS, begin + 100 * MS)
    return write_run(tmp_path / "my run", ranks)


def call(*arguments: object) -> int:
    parser = CommandParser()
    report.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["report", *map(str, arguments)])
    status: int = report.run(parsed)
    return status


def test_the_page_lies_in_the_run_unless_reported_otherwise(
    run_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(run_directory) == 0
    page = (run_directory / "report.html").read_text()
    assert 'id="plot-timeline"' in page
    assert 'id="page-memory"' in page
    assert 'id="page-comparison"' not in page
    captured = capsys.readouterr()
    assert captured.out == f"{run_directory}/report.html\n"
    assert captured.err == f"next: open '{run_directory}/report.html' in a browser\n"


def test_a_file_that_browsers_show_as_text_is_said_to_need_another_name(
    run_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(run_directory, "-o", tmp_path / "page") == 0
    captured = capsys.readouterr()
    assert captured.out == f"{tmp_path}/page\n"
    assert captured.err == f"next: name it {tmp_path}/page.html: browsers show other files as text\n"


def test_its_own_earlier_page_is_replaced_and_nothing_else(run_directory: Path) -> None:
    call(run_directory)
    assert call(run_directory) == 0
    (run_directory / "report.html").write_text("mine")
    with pytest.raises(OutputError, match="--force"):
        call(run_directory)
    assert call(run_directory, "--force") == 0


def test_a_file_that_was_asked_for_is_never_overwritten_without_force(run_directory: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assert call(run_directory, "-o", output) == 0
    with pytest.raises(OutputError, match=r"page\.html exists"):
        call(run_directory, "-o", output)
    assert call(run_directory, "-o", output, "--force") == 0


def test_a_file_in_the_way_is_reported_before_the_run_is_read(tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    output.write_text("mine")
    with pytest.raises(OutputError, match=r"page\.html exists; give --force"):
        call(tmp_path / "no run at all", "-o", output)
    with pytest.raises(OutputError, match="is a directory; expected a file"):
        call(tmp_path / "no run at all", "-o", tmp_path, "--force")


def test_a_page_of_the_user_shows_its_panels_alone(run_directory: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    mine.write_text('title = "Mine"\n[[panels]]\npanel = "collectives"\n')
    call(run_directory, "--dashboard", mine, "-o", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "<h2" in page
    assert 'id="collectives"' in page
    assert 'id="timeline"' not in page


def test_a_dashboard_that_does_not_exist_is_refused_before_the_run_is_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="'nope' is not known"):
        call(tmp_path / "no-run", "--dashboard", "nope")


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotARunError):
        call(tmp_path)


def test_a_page_in_a_folder_that_is_missing_is_refused(run_directory: Path) -> None:
    with pytest.raises(OutputError, match=r"cannot be written \(No such file or directory\)"):
        call(run_directory, "-o", run_directory / "none" / "page.html")


def test_loading_the_command_loads_neither_plotly_nor_torch() -> None:
    heavy = "[name for name in ('plotly', 'torch', 'numpy') if name in sys.modules]"
    code = f"import sys, dtprof.cli.report, dtprof.report; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_writing_a_page_does_not_load_torch(run_directory: Path) -> None:
    code = (
        "import sys, argparse; from pathlib import Path; from dtprof.cli import report\n"
        f"report.run(argparse.Namespace(run_directory=Path({str(run_directory)!r}), output=None, force=False, "
        "dashboard=None, against=None, engine=None, scheduler=None, jobs='1'))\nsys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)


def test_a_second_run_brings_the_page_that_compares_them(run_directory: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    assert call(run_directory, "--against", run_directory, "-o", output) == 0
    page = output.read_text()
    assert 'id="page-comparison"' in page
    assert str(run_directory) in page


def test_several_pages_may_be_named(run_directory: Path, tmp_path: Path) -> None:
    output = tmp_path / "page.html"
    call(run_directory, "--dashboard", "collectives", "--dashboard", "overview", "-o", output)
    page = output.read_text()
    assert page.index('id="page-collectives"') < page.index('id="page-overview"')
    assert 'id="overview-bandwidth"' in page
