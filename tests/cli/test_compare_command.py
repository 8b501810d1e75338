"""`dtprof compare` as it is typed."""

import json
from pathlib import Path

import pytest

from dtprof.cli.main import main
from tests.analysis.noisy_runs import build_ranks
from tests.builders import write_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "before", build_ranks(1))
    write_run(folder / "after", build_ranks(2, delay_us=5_000.0))
    return folder


def test_two_runs_on_disk_are_compared(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "before"), str(runs / "after"), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    step = document["changes"][0]
    assert step["low"] <= 5_000_000 <= step["high"]
    assert main(["compare", str(runs / "before"), str(runs / "before")]) == 0
    assert "no difference beyond the noise in any of" in capsys.readouterr().out


@pytest.mark.parametrize("share", ["x", "-1", "200%", "nan", ""])
def test_a_share_that_is_none_is_refused(runs: Path, share: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "before"), str(runs / "after"), f"--at-least={share}"]) == 2
    assert f"--at-least is {share!r}; expected a share from 0 to 100 %" in capsys.readouterr().err


def test_what_is_no_run_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "before"), str(runs / "nothing")]) == 2
    assert "nothing does not exist" in capsys.readouterr().err
