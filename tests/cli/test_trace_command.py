"""`dtprof trace` and the settings of profiler windows: what cannot be taken, and what is said of it."""

import contextlib
import gzip
import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

from dtprof import settings
from dtprof.capture.window_files import TooLargeError, TracedStep, pack
from dtprof.cli.main import main
from dtprof.errors import UsageError
from dtprof.records import paths, trace_requests
from dtprof.records.trace_requests import TraceRequest
from dtprof.session import engines
from tests.builders import RankBuilder, write_run


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("10-13", "expected A:B"),
        ("a:b", "expected A:B"),
        ("", "expected A:B"),
        ("13:10", "ends before it begins"),
        ("1:3", "expected step 2 or later"),
        ("0", "expected step 2 or later"),
        ("10:110", "at most 100 steps"),
    ],
)
def test_steps_that_cannot_be_traced_are_refused_with_what_to_give(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settings.parse_traced_steps(text)


def test_steps_and_ranks_are_read() -> None:
    assert settings.parse_traced_steps("10:13") == (10, 13)
    assert settings.parse_traced_steps("10:109") == (10, 109)
    assert settings.parse_traced_steps("7") == (7, 7)
    assert settings.parse_traced_ranks("") == []
    assert settings.parse_traced_ranks("0,5") == [(0, 0), (5, 5)]
    assert settings.parse_traced_ranks("0-3, 8") == [(0, 3), (8, 8)]
    for text in ("x", "3-1", "1,", "-1", "99999999"):
        with pytest.raises(UsageError, match="expected ranks such as"):
            settings.parse_traced_ranks(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--trace-ranks", "0"], "expected --trace-steps as well"),
        (["--trace-steps", "1:3"], "expected step 2 or later"),
        (["--check", "all"], "--check (or DTPROF_CHECK) is 'all'; expected handles"),
        (["--trace-steps", "2:3", "--max-trace-mb", "0"], "expected a number of at least 1"),
    ],
)
def test_run_refuses_before_it_starts_anything(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "-o", str(tmp_path / "run"), *options, "--", "true"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of two ranks that have ended; rank 0 has started a window, and its file is damaged."""
    folder = write_run(tmp_path / "run", [RankBuilder(0, world_size=2), RankBuilder(1, world_size=2)])
    rank = folder / paths.rank_folder_name(0, 0)
    entries = [
        {"k": "window", "id": 1, "state": "written", "first": 2, "last": 3, "begin_ns": 1, "file": "damaged.json.gz"},
        {"k": "window", "id": 2, "state": "begun", "first": 5, "last": 6, "begin_ns": 1},
        {"k": "window", "id": 3, "state": "written", "first": 9, "last": 9, "file": "../../elsewhere.json.gz"},
    ]
    with (rank / paths.STRINGS).open("a") as stream:
        stream.writelines(json.dumps(entry) + "\n" for entry in entries)
    (rank / "damaged.json.gz").write_bytes(b"nothing")
    return folder


def test_windows_without_a_trace_are_listed_with_the_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(run), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["windows"]
    # The third names a file outside its folder: it is damaged, and left out.
    assert [(row["state"], row["first"], row["matched_fraction"]) for row in rows] == [
        ("written", 2, None),
        ("begun", 5, None),
    ]
    assert "damaged.json.gz" in rows[0]["problems"][0]
    assert main(["trace", str(run)]) == 0
    assert "rank 0, steps 5 to 6: no window: it was started and not written" in capsys.readouterr().out


def test_workers_read_the_windows_that_this_process_does(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = []
    for jobs in ("1", "2"):
        assert main(["trace", str(run), "--json", "--jobs", jobs]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1]


def test_workers_elsewhere_find_a_run_that_was_named_from_here(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Elsewhere:
        """Works in another folder, as a Dask worker may."""

        at_once = 1

        def submit(self, work: Callable[[object], object], task: object) -> "Future[object]":
            done: Future[object] = Future()
            with contextlib.chdir("/"):
                done.set_result(work(task))
            return done

    @contextlib.contextmanager
    def elsewhere(*_: object) -> Iterator[Elsewhere]:
        yield Elsewhere()

    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(engines, "executor_for", elsewhere)
    assert main(["trace", run.name, "--json"]) == 0
    assert [row["first"] for row in json.loads(capsys.readouterr().out)["windows"]] == [2, 5]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--ranks", "1"], "holds no profiler window"),
        (["--ranks", "7"], "rank 7 left no log; expected ranks of 0 to 1"),
        (["--ranks", "one"], "expected ranks such as --ranks 0,5"),
        (["--now"], "none of its ranks runs on this host"),
        (["--memory"], "expected --now as well"),
        (["--steps", "2"], "expected --now as well"),
        (["--engine", "ray"], "is 'ray'; expected local or dask"),
        (["--now", "--timeout", "0"], "expected a number of seconds above 0"),
    ],
)
def test_what_cannot_be_shown_or_taken_is_refused(
    run: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", str(run), *options]) == 2
    assert said in capsys.readouterr().err
    assert not list(run.glob(f"rank-*/*{paths.TRACE_REQUEST}*"))


def test_a_request_is_taken_once_and_nonsense_is_taken_away(tmp_path: Path) -> None:
    request = TraceRequest(id="abc", steps=3, memory=True)
    trace_requests.put(tmp_path, request)
    assert trace_requests.take(tmp_path) == request
    assert trace_requests.take(tmp_path) is None
    trace_requests.put(tmp_path, request)
    assert trace_requests.withdraw(tmp_path)
    assert not trace_requests.withdraw(tmp_path)
    for text in ("", "{", '{"id": "a", "steps": 1000000}', '{"id": 1, "steps": 1}'):
        (tmp_path / paths.TRACE_REQUEST).write_text(text)
        with pytest.raises(ValueError, match=r"Expecting|holds no request"):
            trace_requests.take(tmp_path)
        assert not (tmp_path / paths.TRACE_REQUEST).exists()


def test_a_trace_is_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    raw, target = tmp_path / ".window-2.json", tmp_path / "window-2-2.pt.trace.json.gz"
    whole = '{"baseTimeNanoseconds": 1000, "traceEvents": [{"name": "a"}\n],"traceName": "x" }'
    steps = [TracedStep(number=2, begin_ns=3000, end_ns=8000)]

    def packed(text: str, limit_bytes: int = 10_000) -> int:
        raw.write_text(text)
        return pack(raw, target, pid=1, steps=steps, facts={"id": 1}, limit_bytes=limit_bytes)

    for text, limit, error in ((whole, 10, TooLargeError), (whole[:-3], 10_000, ValueError), ("", 10_000, ValueError)):
        with pytest.raises(error):
            packed(text, limit)
        assert list(tmp_path.iterdir()) == []
    assert packed(whole) == target.stat().st_size

    document = json.loads(gzip.decompress(target.read_bytes()))
    assert document["traceName"] == "x"
    assert document["dtprof"] == {"id": 1}
    step = document["traceEvents"][-1]
    assert (step["name"], step["ts"], step["dur"]) == ("ProfilerStep#2", 2.0, 5.0)  # us after the base
