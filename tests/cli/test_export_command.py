"""`dtprof export` and `dtprof tensorboard`: what is written where, what is refused, what is said."""

import ast
import importlib.util
import json
import shlex
import socket
import threading
from pathlib import Path

import pytest

from dtprof.cli.main import main
from dtprof.interchange.exporters.tensorboard_logs import ScalarLogs
from dtprof.session import tensorboard_view
from dtprof.session.run_exports import FORMATS
from tests.analysis.noisy_runs import build_ranks
from tests.builders import RankBuilder, write_run

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", build_ranks(1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FORMATS)
def test_every_format_is_written_once_and_says_what_to_do_next(
    kind: str, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    out = tmp_path / "deep" / "out"
    assert main(["export", str(run), "--format", kind, "-o", str(out)]) == 0
    said = capsys.readouterr()
    assert said.out == f"{out}\n"
    assert "next: " in said.err
    assert str(out) in said.err
    assert out.exists()
    assert main(["export", str(run), "--format", kind, "-o", str(out)]) == 2
    assert "exists already; give another path with -o, or --force to overwrite it" in capsys.readouterr().err
    assert main(["export", str(run), "--format", kind, "-o", str(out), "--force"]) == 0
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_what_to_do_next_can_be_pasted_whatever_the_path(run: Path, tmp_path: Path, capsys: Captured) -> None:
    out = tmp_path / "it's $HOME"
    assert main(["export", str(run), "--format", "kineto", "-o", str(out)]) == 0
    program, option, code = shlex.split(capsys.readouterr().err.partition("next: ")[2])
    assert (program, option) == ("python", "-c")
    assert ast.literal_eval(code.partition("trace_dir=")[2].removesuffix(")")) == str(out)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", FORMATS)
def test_a_run_without_ranks_and_one_without_steps_give_what_there_is(kind: str, tmp_path: Path) -> None:
    for name, ranks in (("none", []), ("stepless", [RankBuilder(0, world_size=2)])):
        for rank in ranks:
            rank.op("all_reduce", 10)
        run = write_run(tmp_path / f"run-{name}", ranks)
        assert main(["export", str(run), "--format", kind, "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).exists()


@pytest.mark.filterwarnings("ignore")
def test_hosts_whose_clocks_are_not_aligned_are_said_to_be_apart(tmp_path: Path, capsys: Captured) -> None:
    ranks = [RankBuilder(i, world_size=2, host=f"host-{i}", boot_id=f"boot-{i}") for i in range(2)]
    for rank in ranks:
        rank.span("backward", 10, 20)
    run = write_run(tmp_path / "run", ranks)
    assert main(["export", str(run), "--format", "perfetto", "-o", str(tmp_path / "out")]) == 0
    assert "clocks of the hosts are not aligned" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--format", "csv", "-o", "{tmp}/mine", "--force"], "holds files that dtprof did not write"),
        (["--format", "csv", "-o", "{tmp}/mine/notes.txt", "--force"], "is a file; this format is a folder"),
        (["--format", "perfetto", "-o", "{tmp}/mine", "--force"], "is a directory; this format is one file"),
        (["--format", "csv", "-o", "", "--force"], "'.' is no name of a file or folder to make"),
        (["--format", "csv", "-o", "{tmp}/mine/..", "--force"], "is no name of a file or folder to make"),
        (["--format", "perfetto", "-o", "/dev/null", "--force"], "is neither a file nor a directory"),
        (["--format", "perfetto", "-o", "{tmp}/mine/notes.txt/x"], "cannot be written"),
        (["--format", "parquet", "-o", "{tmp}/out", "--steps", "1:2"], "--steps chooses what a trace holds"),
        (["--format", "chrome", "-o", "{tmp}/out", "--steps", "900:901"], "has none of the steps 900:901"),
    ],
)
def test_what_cannot_be_written_is_a_sentence_and_nothing_is_touched(
    arguments: list[str], sentence: str, run: Path, tmp_path: Path, capsys: Captured
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("precious", encoding="utf-8")
    assert main(["export", str(run), *(word.format(tmp=tmp_path) for word in arguments)]) == 2
    said = capsys.readouterr()
    assert sentence in said.err
    assert said.out == ""
    assert (tmp_path / "mine" / "notes.txt").read_text(encoding="utf-8") == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


@pytest.mark.parametrize("steps", ["5", "5:a", "7:3", "-1:2", "1:2:3", ""])
def test_steps_that_are_no_range_are_refused(steps: str, run: Path, tmp_path: Path, capsys: Captured) -> None:
    arguments = ["export", str(run), "--format", "chrome", "-o", str(tmp_path / "out"), f"--steps={steps}"]
    if steps == "5":
        assert main(arguments) == 0
        return
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "expected A:B, for example 100:110" in capsys.readouterr().err


def test_the_schema_of_tables_is_json(run: Path, tmp_path: Path) -> None:
    main(["export", str(run), "--format", "csv", "-o", str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "schema.json").read_text(encoding="utf-8"))["schema"] == 1


def test_a_taken_port_is_a_sentence(run: Path, capsys: Captured) -> None:
    with socket.create_server(("localhost", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["tensorboard", str(run), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert f"port {port} cannot be listened on" in said
    assert "--port" in said


def test_a_port_that_is_none_is_a_sentence(run: Path, capsys: Captured) -> None:
    for port in ("70000", "0", "-1", "http", ""):
        assert main(["tensorboard", str(run), f"--port={port}"]) == 2
        assert f"--port is {port!r}; expected a port from 1 to 65535" in capsys.readouterr().err


def test_without_tensorboard_the_command_names_the_extra(
    run: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", {"tensorboard": None}.get)
    assert main(["tensorboard", str(run)]) == 2
    assert "pip install 'dtprof[tensorboard]'" in capsys.readouterr().err


def test_what_a_running_job_ends_is_added_until_it_has_ended(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard_view, "AGAIN_AFTER_S", 0.01)
    logs = ScalarLogs(folder=tmp_path / "logs")
    ended = threading.Event()
    follower = threading.Thread(target=tensorboard_view.follow, args=(run, logs, ended))
    follower.start()
    follower.join(60)  # the run has ended, and so does following it, once its steps are there
    logs.close()
    assert not follower.is_alive()
    assert logs.written == 30


def test_a_run_that_cannot_be_read_for_a_moment_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorboard_view, "AGAIN_AFTER_S", 0.01)
    logs, ended = ScalarLogs(folder=tmp_path / "logs"), threading.Event()
    follower = threading.Thread(target=tensorboard_view.follow, args=(tmp_path / "run", logs, ended))
    follower.start()
    write_run(tmp_path / "elsewhere", build_ranks(1)).rename(tmp_path / "run")
    follower.join(60)
    logs.close()
    assert not follower.is_alive()
    assert logs.written == 30
