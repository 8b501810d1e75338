"""`dtprof dashboard`: what it says where there is no run to show."""

from pathlib import Path

import pytest

from dtprof.cli.main import main
from dtprof.session import uvicorn_server


def test_without_a_folder_of_runs_the_next_step_is_to_record_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["dashboard", "--port", "0"]) == 2
    assert "dtprof dashboard RUN, or record one with dtprof run -- COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("named", [True, False])
def test_an_empty_folder_of_runs_is_served_and_the_next_step_is_to_record_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, named: bool
) -> None:
    store = tmp_path / "dtprof-runs"
    store.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(uvicorn_server, "serve", lambda *_: None)  # no request comes
    assert main(["dashboard", *([str(store)] if named else []), "--port", "0"]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith("http://127.0.0.1:")
    assert printed.err.endswith("no run is here yet; record one with dtprof run -- COMMAND\n")
