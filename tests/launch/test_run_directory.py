"""The directory of a run: made where it can be, refused where something would be lost."""

import json
import re
import socket
from pathlib import Path

import pytest

from dtprof.errors import OutputError
from dtprof.launch import run_directory
from dtprof.records import paths, schema
from tests.builders import RankBuilder, write_run
from tests.jobs import REPOSITORY

NODE = paths.node_folder_name(socket.gethostname())


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["torchrun", "--nproc-per-node", "4", "src/train.py", "--epochs", "3"], "train"),
        (["python", "-m", "torch.distributed.run", "train.py"], "train"),
        (["python", "-m", "torch.distributed.run", "-m", "my.trainer"], "my.trainer"),
        (["/opt/bin/pretrain"], "pretrain"),
        (["my tool!"], "my_tool_"),
    ],
)
def test_default_name_tells_the_program(command: list[str], name: str) -> None:
    chosen = run_directory.default_directory(command)
    assert chosen.parent == Path("dtprof-runs")
    assert chosen.name[16:] == name
    assert chosen.name[:15].replace("-", "").isdigit()


def test_default_name_is_new_within_the_same_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = set()
    for _ in range(5):
        chosen = run_directory.default_directory(["train.py"])
        run_directory.create(chosen, force=False)
        names.add(chosen)
    assert len(names) == 5


@pytest.mark.parametrize("place", ["new", "deep/er/new", "."])
def test_new_or_empty_directory_is_taken(tmp_path: Path, place: str) -> None:
    run_directory.create(tmp_path / place, force=False)
    assert [path.name for path in (tmp_path / place).iterdir()] == [NODE]


def test_directory_with_anything_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    with pytest.raises(OutputError, match="is not empty; give another directory, or --force"):
        run_directory.create(tmp_path, force=False)


def test_the_directory_of_a_run_that_goes_on_is_refused_with_the_way_to_join_it(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text('{"started_realtime_ns": 1, "ended_realtime_ns": 0}')
    with pytest.raises(
        OutputError, match="has not ended; give another directory, --join on every host where it is one"
    ):
        run_directory.create(tmp_path, force=False)


def test_force_replaces_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [RankBuilder(rank, world_size=2) for rank in (0, 1)])
    for name in ("report.html", ".verdict.json", ".run.json.123", ".told-0123abcd"):
        (run / name).touch()
    format_page = (REPOSITORY / "docs" / "reference" / "run_format.md").read_text()
    documented = [name.replace("PID", "12") for name in re.findall(r"`node-HOST/([\w.-]+)`", format_page)]
    assert {paths.EXITS, paths.STACKS, paths.MISMATCHES, "launcher-12.json"} <= set(documented)
    for name in (*documented, ".stacks.json.7", ".launcher-12.json.7", ".warned-0123abcd"):
        (run / "node-host-a" / name).touch()
    run_directory.create(run, force=True)
    assert [path.name for path in run.iterdir()] == [NODE]


@pytest.mark.parametrize(
    "foreign", ["notes.txt", ".git/", ".bashrc", "rank-notes.txt", "rank-1/", "node-modules/index.js", "run.json/"]
)
def test_force_refuses_to_delete_what_dtprof_did_not_write(tmp_path: Path, foreign: str) -> None:
    run = write_run(tmp_path / "run", [RankBuilder(0, world_size=1)])
    if foreign == "run.json/":
        (run / "run.json").unlink()
    file = run / foreign
    if foreign.endswith("/"):
        file.mkdir()
    else:
        file.parent.mkdir(exist_ok=True)
        file.touch()
    before = sorted(run.rglob("*"))
    with pytest.raises(OutputError, match="which dtprof did not write; --force replaces runs only"):
        run_directory.create(run, force=True)
    assert sorted(run.rglob("*")) == before


def test_force_does_not_follow_links_out_of_the_run(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").touch()
    run = write_run(tmp_path / "run", [RankBuilder(0, world_size=1)])
    (run / "rank-00001.0").symlink_to(precious)
    with pytest.raises(OutputError, match=r"'rank-00001\.0', which dtprof did not write"):
        run_directory.create(run, force=True)
    assert (precious / "data").exists()


def test_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "out"
    file.touch()
    with pytest.raises(OutputError, match="is a file; expected a directory that is empty or new"):
        run_directory.create(file, force=True)


@pytest.mark.parametrize("name", ["file/run", "x" * 300])
def test_place_that_cannot_be_made_is_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"cannot be written to \((Not a directory|File name too long)\); give a dir"):
        run_directory.create(tmp_path / name, force=False)


def test_manifest_says_what_runs_and_later_how_it_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_TIMING", raising=False)
    monkeypatch.setenv("TORCH_API_TOKEN", "hush")
    monkeypatch.setenv("HOME_SWEET", "home")
    manifest = run_directory.RunManifest(tmp_path, ["torchrun", "a b.py"], {"on_hang": "stop"})
    written = json.loads((tmp_path / paths.MANIFEST).read_text())
    assert written["format_version"] == schema.FORMAT_VERSION
    assert written["command"] == ["torchrun", "a b.py"]
    assert (written["exit_status"], written["ended_realtime_ns"]) == (None, 0)
    assert written["environment"]["NCCL_DEBUG"] == "INFO"
    assert {"TORCH_API_TOKEN", "HOME_SWEET"} & set(written["environment"]) == set()
    assert written["given_to_torch"] == {"TORCH_NCCL_ENABLE_TIMING": "1"}
    manifest.note("a word")
    assert manifest.update({"exit_status": 3})
    written = json.loads((tmp_path / paths.MANIFEST).read_text())
    assert (written["exit_status"], written["notes"], written["settings"]) == (3, ["a word"], {"on_hang": "stop"})


def test_manifest_that_cannot_be_completed_is_no_error(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    manifest = run_directory.RunManifest(run, ["x"], {})
    (run / paths.MANIFEST).unlink()
    run.rmdir()
    assert manifest.update({"exit_status": 0}) is False
