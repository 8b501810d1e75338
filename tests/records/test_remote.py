"""Runs at URLs: what is fetched, what is not fetched again, and what is said where it cannot be."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.cli.main import main
from dtprof.cli.parsers import output_path
from dtprof.errors import MissingDependencyError, NotARunError, OutputError
from dtprof.records import remote
from dtprof.records.reader import open_piecemeal, open_run
from tests.synthetic import Job, generate

URL = Path("memory://runs/mine")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the cache folder, which is empty."""
    monkeypatch.setenv("DTPROF_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "runs"


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Path]:
    """Return a run on disk that lies in memory, too, at URL."""
    generate(tmp_path / "run", Job(dp=4, steps=4))
    memory = fsspec.filesystem("memory")
    memory.put(str(tmp_path / "run"), "/runs/mine", recursive=True)
    yield tmp_path / "run"
    memory.rm("/runs", recursive=True)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of what is fetched, as it grows."""
    names: list[str] = []
    get = remote._get

    def note(file_system: object, wanted: dict[str, Path]) -> None:
        names.extend(name.removeprefix("/runs/mine/") for name in wanted)
        get(file_system, wanted)

    monkeypatch.setattr(remote, "_get", note)
    return names


def test_a_run_at_a_url_is_the_run_on_disk(run: Path) -> None:
    opened = open_run(URL)
    assert opened.name == "memory://runs/mine"
    assert repr(summarise(opened)).replace(opened.name, str(run)) == repr(summarise(open_run(run)))


def test_commands_take_a_url(run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    for command in (["summary"], ["diagnose"], ["report"], ["compare", str(run)], ["check", "--max-step-ms", "10000"]):
        assert main([*command, str(URL)]) == 0, command
    assert "memory://runs/mine" in capsys.readouterr().out
    assert (run.parent / "mine-report.html").exists()


def test_the_next_command_names_the_url_as_it_was_given(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.exists()
    for command in ("diagnose", "check --max-wait 0"):
        main([*command.split(), str(URL)])
        assert capsys.readouterr().err.endswith(" memory://runs/mine\n")


@pytest.mark.parametrize("command", ["top --once", "dashboard", "trace --now"])
def test_what_deals_with_a_running_job_takes_no_url_but_that_of_a_path(
    command: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *options = command.split()
    assert run.exists()
    assert main([name, str(URL), *options]) == 2
    assert "memory://runs/mine is a URL, and " in (said := capsys.readouterr().err)
    assert "dtprof summary memory://runs/mine" in said
    assert main([name, f"file://{tmp_path}/none", *options]) == 2
    assert f"{tmp_path}/none does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", ["gather {run}", "report {run}", "export {run} --format csv", "import x.json", "run -- true"]
)
def test_no_command_writes_to_a_url(
    command: str, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv("DTPROF_OUTPUT", "s3://bucket/x")
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(command.format(run=run).split()))
    assert "s3://bucket/x is a URL; expected a path of this machine" in capsys.readouterr().err
    assert not Path("s3:").exists()
    assert output_path(f"file://{run}/x") == run / "x"


def test_what_has_not_changed_is_not_fetched_again(run: Path, fetched: list[str]) -> None:
    open_run(URL)
    assert len(fetched) == len([file for file in run.rglob("*") if file.is_file()])
    fetched.clear()
    open_run(URL)
    assert fetched == []
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/runs/mine/rank-00001.0/strings.jsonl", b'{"k":"note","text":"new"}\n')
    memory.rm("/runs/mine/rank-00003.0", recursive=True)
    again = open_run(URL)
    assert fetched == ["rank-00001.0/strings.jsonl"]
    assert again.load(1).notes == ("new",)
    assert again.ranks == [0, 1, 2], "what is gone at the source is gone in the copy"


def test_ranks_are_fetched_by_who_reads_them(run: Path, fetched: list[str]) -> None:
    opened = open_piecemeal(URL)
    assert opened.ranks == [0, 1, 2, 3]
    assert [name for name in fetched if name.startswith("rank-")] == []
    part = opened.part([2])
    fetched.clear()
    assert part.load(2).num_events == open_run(run).load(2).num_events
    assert fetched == ["rank-00002.0/events.00000", "rank-00002.0/strings.jsonl"]


def test_a_copy_takes_no_more_room_than_the_records(run: Path) -> None:
    assert run.exists()
    segment = open_run(URL).path / "rank-00000.0" / "events.00000"
    assert segment.stat().st_size == 4 << 20
    assert segment.stat().st_blocks * 512 < 1 << 20


def test_copies_that_nobody_used_for_long_go(run: Path, cache: Path) -> None:
    assert run.exists()
    old, young = cache / "0123", cache / "4567"
    for folder, days in ((old, 8), (young, 6)):
        folder.mkdir(parents=True)
        os.utime(folder, (time.time() - days * 86_400,) * 2)
    open_run(URL)
    assert not old.exists()
    assert young.exists()


def test_a_file_url_is_the_path(run: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    opened = open_run(Path(f"file://{run}"))
    assert opened.path == run
    assert not cache.exists()


def test_a_folder_whose_name_looks_like_a_url_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    generate(Path("s3:/bucket"), Job(dp=1, steps=3))
    assert open_run(Path("s3:/bucket")).ranks == [0]
    assert remote.url_of(Path("runs/mine")) is None
    assert remote.url_of(Path("/runs/a:b")) is None
    assert remote.url_of(Path("simplecache::s3://bucket/mine")) == "simplecache::s3://bucket/mine"


def test_no_key_of_a_bucket_leads_out_of_the_copy(run: Path, cache: Path) -> None:
    memory = fsspec.filesystem("memory")
    memory.store["/runs/mine/node-a/../../../escaped"] = memory.store["/runs/mine/run.json"]
    try:
        assert open_run(URL).ranks == open_run(run).ranks
        assert list(cache.parent.rglob("escaped")) == []
    finally:
        del memory.store["/runs/mine/node-a/../../../escaped"]


def test_a_cache_folder_that_cannot_be_written_is_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DTPROF_CACHE_DIR", str(run / "run.json"))
    with pytest.raises(OutputError, match="set DTPROF_CACHE_DIR to a folder that can"):
        open_run(URL)


def test_a_password_in_a_url_is_not_shown() -> None:
    assert remote.shown("ftp://me:secret@host/runs/mine") == "ftp://host/runs/mine"
    assert remote.shown("s3://bucket/me@home") == "s3://bucket/me@home"


def test_without_fsspec_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(
        MissingDependencyError, match=r"reading memory://runs/mine needs .*pip install 'dtprof\[remote\]'"
    ):
        open_run(URL)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("memory://runs/none", "memory://runs/none does not exist, or is empty; expected a run directory"),
        ("nosuch://bucket/run", "nosuch://bucket/run cannot be read .ValueError: Protocol not known: nosuch"),
    ],
)
def test_what_cannot_be_read_is_said(url: str, said: str) -> None:
    with pytest.raises(NotARunError, match=said):
        open_run(Path(url))


def test_a_source_that_does_not_answer_is_not_said_to_be_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ConnectionRefusedError("nobody listens")

    monkeypatch.setattr(fsspec.filesystem("memory"), "ls", refuse)
    with pytest.raises(NotARunError, match=r"cannot be read \(ConnectionRefusedError: nobody listens\)"):
        open_run(Path("memory://runs/none"))


@pytest.mark.parametrize("opened", [open_run, open_piecemeal])
def test_one_file_of_a_run_is_no_run(run: Path, opened: Callable[[Path], object]) -> None:
    assert run.exists()
    with pytest.raises(NotARunError, match=r"memory://runs/mine/run.json is a file; expected a run directory"):
        opened(URL / "run.json")


def test_a_package_for_the_kind_of_url_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingDependencyError, match="reading s3://bucket/run needs one more package: Install s3fs"):
        open_run(Path("s3://bucket/run"))


def test_a_folder_at_a_url_that_is_no_run_is_said_so(run: Path) -> None:
    fsspec.filesystem("memory").pipe_file("/runs/other/readme.txt", b"hello")
    assert run.exists()
    with pytest.raises(NotARunError, match=r"^memory://runs/other holds no run"):
        open_run(Path("memory://runs/other"))
