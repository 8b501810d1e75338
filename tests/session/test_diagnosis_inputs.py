"""What is given to `dtprof diagnose` lies in a run, or holds runs: the whole is named, nothing is taken for a log."""

from pathlib import Path

import pytest

from dtprof.cli.main import main
from dtprof.records import paths
from tests.builders import RankBuilder, write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "mine", [RankBuilder(0, world_size=1)])


def refusal(path: Path, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["diagnose", str(path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    return said.err


@pytest.mark.parametrize("part", [paths.MANIFEST, "rank-00000.0", f"rank-00000.0/{paths.STRINGS}"])
def test_a_part_of_a_run_is_refused_with_the_command_for_the_whole(
    run: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert f"{run / part} is a part of the run {run}" in (said := refusal(run / part, capsys))
    assert f"dtprof diagnose {run}" in said


def test_what_a_user_keeps_in_the_folder_of_a_run_is_read(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "rank-0.log").write_text("ValueError: bad\n", encoding="utf-8")
    assert main(["diagnose", str(run / "rank-0.log")]) in (0, 1)
    assert "verdict:" in capsys.readouterr().out


def test_a_folder_of_runs_is_refused_with_one_of_them(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"{run.parent} holds 1 run and is none" in (said := refusal(run.parent, capsys))
    assert f"dtprof diagnose {run}" in said


def test_logs_beside_a_run_are_read_and_the_run_is_reported(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run.parent / "job.log").write_text("step 1\n", encoding="utf-8")
    main(["diagnose", str(run.parent)])
    said = " ".join(capsys.readouterr().out.split())
    assert f"{run} is a run and was not read" in said
