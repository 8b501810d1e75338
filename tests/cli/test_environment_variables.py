"""The environment beside the options: every option has a variable, and the command line wins."""

import argparse
import json
import os
import re
from pathlib import Path

import pytest

from dtprof.cli.main import COMMANDS, build_parser, main
from dtprof.session import report_writing
from tests.analysis.noisy_runs import build_ranks
from tests.builders import write_run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep settings of the person who runs the tests out of them."""
    for name in [name for name in os.environ if name.startswith("DTPROF_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", build_ranks(1))


def options_of(command: str) -> list[argparse.Action]:
    (subparsers,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    return [
        action for action in subparsers.choices[command]._actions if action.option_strings and action.dest != "help"
    ]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_the_variable_of_every_option(command: str) -> None:
    assert [
        one.option_strings for one in options_of(command) if not re.search(r"\[DTPROF_\w+(=1)?\]$", one.help or "")
    ] == []


def test_no_variable_of_a_command_stands_for_two_of_its_options() -> None:
    for command in COMMANDS:
        variables = [re.findall(r"\[(DTPROF_\w+)", one.help or "")[0] for one in options_of(command)]
        assert len(set(variables)) == len(variables)


def test_an_option_that_must_be_given_may_come_from_the_environment(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DTPROF_FORMAT", "csv")
    monkeypatch.setenv("DTPROF_OUTPUT", str(tmp_path / "tables"))
    assert main(["export", str(run)]) == 0
    assert (tmp_path / "tables" / "ranks.csv").exists()


def test_the_command_line_wins_also_with_the_default(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTPROF_TOP", "7")
    given = build_parser().parse_args(["trace", str(run), "--top", "10"])
    assert (given.top, given.from_environment) == (10, {})
    left_open = build_parser().parse_args(["trace", str(run)])
    assert (left_open.top, left_open.from_environment) == (7, {"--top": "DTPROF_TOP"})
    monkeypatch.setenv("DTPROF_TOP", "")
    assert build_parser().parse_args(["trace", str(run)]).top == 10


def test_an_option_without_a_value_is_set_by_anything_but_0(monkeypatch: pytest.MonkeyPatch) -> None:
    for text, is_set in (("1", True), ("0", False), ("", False), ("yes", True)):
        monkeypatch.setenv("DTPROF_FORCE", text)
        assert build_parser().parse_args(["run"]).force is is_set


def test_several_pages_are_given_with_commas_and_replaced_by_those_of_the_command_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DTPROF_DASHBOARD", "memory,overview")
    assert build_parser().parse_args(["report", "RUN"]).dashboard == ["memory", "overview"]
    assert build_parser().parse_args(["report", "RUN", "--dashboard", "pipeline"]).dashboard == ["pipeline"]


def test_options_that_exclude_each_other_do_so_across_the_environment(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv("DTPROF_MARKDOWN", "1")
    assert main(["summary", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["schema"] == 1
    monkeypatch.setenv("DTPROF_JSON", "1")
    with pytest.raises(SystemExit) as ended:
        main(["summary", str(run)])
    assert ended.value.code == 2
    assert "DTPROF_MARKDOWN is '1' and DTPROF_JSON is '1'; expected one of them" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "variable", "text", "said"),
    [
        ("trace", "DTPROF_TOP", "0", "--top (from DTPROF_TOP) is '0': "),
        ("export", "DTPROF_FORMAT", "xls", "--format (from DTPROF_FORMAT) is 'xls'; expected one of perfetto, "),
        ("check", "DTPROF_MAX_BUBBLE", "300", "--max-bubble is '300'; expected a share from 0 to 100 %"),
        ("check", "DTPROF_MAX_BUBBLE", "300", "; --max-bubble is from DTPROF_MAX_BUBBLE\n"),
    ],
)
def test_an_error_says_that_the_value_is_of_the_environment(
    command: str, variable: str, text: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setenv(variable, text)
    try:
        status = main([command, "RUN", *(["-o", "x"] if command == "export" else [])])
    except SystemExit as ended:
        status = int(str(ended.code))
    assert status == 2
    assert said in capsys.readouterr().err


def test_the_directory_of_dtprof_run_is_not_the_page_of_report(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(report_writing, "DEFAULT_FILE", "page.html")
    monkeypatch.setenv("DTPROF_OUTPUT", str(run))
    assert main(["report", str(run), "--dashboard", "overview", "--jobs", "1"]) == 0
    assert capsys.readouterr().out == f"{run / 'page.html'}\n"
    monkeypatch.setenv("DTPROF_OUTPUT", str(tmp_path / "chosen.html"))
    assert main(["report", str(run), "--dashboard", "overview", "--jobs", "1"]) == 0
    assert (tmp_path / "chosen.html").exists()
