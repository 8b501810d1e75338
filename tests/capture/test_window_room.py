"""Windows taken in turn leave room for later ones: the oldest of them are deleted, and said to be."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dtprof import settings
from dtprof.capture import window_control, window_turns
from dtprof.capture.window_control import Windows

S = 1_000_000_000


class Profiler:
    """A profiler whose trace, of random numbers, takes 24 KB however it is compressed."""

    def __init__(self, give_way: object) -> None:
        del give_way

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def save(self, file: Path) -> None:
        import random

        noise = random.Random(0).randbytes(20_000).hex()
        file.write_text(json.dumps({"baseTimeNanoseconds": 0, "traceEvents": [{"ph": "M", "name": noise}]}))


class Recorder:
    """Keep the entries."""

    def __init__(self) -> None:
        self.windows: dict[int, dict[str, Any]] = {}

    def write_entry(self, text: str) -> None:
        fields = json.loads(text)
        self.windows[fields["id"]] = fields


def test_oldest_windows_in_turn_are_deleted_for_later_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0]
    monkeypatch.setattr(time, "time_ns", lambda: clock[0])
    monkeypatch.setattr(window_control, "WindowProfiler", Profiler)
    monkeypatch.setattr(window_turns, "MOST_TIME", 1000)
    monkeypatch.setenv(settings.TRACE_EVERY.env, "1s")
    windows, recorder = Windows(memory=None), Recorder()  # type: ignore[arg-type]
    windows.begin_log(recorder, tmp_path, 0, 1)  # type: ignore[arg-type]
    windows._left_bytes = 75_000  # of which a window takes 23,722: two, and room for the next
    for step in range(1, 4 * 6):
        clock[0] += S // 4
        windows.at_step_end(step)
        for thread in threading.enumerate():
            if thread.name == "dtprof-window":
                thread.join()
    states = [entry["state"] for _, entry in sorted(recorder.windows.items())]
    assert states == ["failed"] * 3 + ["written"] * 2
    assert {entry["reason"] for entry in recorder.windows.values() if entry["state"] == "failed"} == {
        window_control.DELETED
    }
    kept = {entry["file"] for entry in recorder.windows.values() if entry["state"] == "written"}
    assert {file.name for file in tmp_path.glob("window-*")} == kept
    sizes = [entry["bytes"] for entry in recorder.windows.values() if entry["state"] == "written"]
    assert windows._left_bytes == 75_000 - sum(sizes)
