"""run.json as every reader of it gets it."""

import json
import os
from pathlib import Path

import pytest

from dtprof.records import paths, writer
from dtprof.records.manifest import Manifest, parse_manifest, read_manifest

OWN = {"pid": os.getpid(), "ticks": writer.start_ticks(os.getpid()), "boot": writer.boot_id()}


@pytest.mark.parametrize("text", ["", "[]", '{"command": 5, "exit_status": "1", "started_by": [1], "oom_kills": null}'])
def test_what_is_missing_or_damaged_is_unknown(tmp_path: Path, text: str) -> None:
    (tmp_path / paths.MANIFEST).write_text(text)
    read = read_manifest(tmp_path)
    assert (read.command, read.exit_status, read.starter, read.oom_kills) == ((), None, None, 0)
    assert read.is_running() is None


@pytest.mark.parametrize(("changed", "is_running"), [({}, True), ({"ticks": 1}, False), ({"boot": "other"}, None)])
def test_a_job_runs_while_the_very_process_that_started_its_ranks_does(
    changed: dict[str, object], is_running: bool | None
) -> None:
    pid, ticks, boot = (OWN | changed).values()
    launched = parse_manifest({"launcher_pid": pid, "launcher_start_ticks": ticks, "boot_id": boot})
    without = parse_manifest({"started_by": [pid, ticks, boot]})
    assert (launched.is_running(), without.is_running()) == (is_running, is_running)
    assert (launched.is_without_launcher, without.is_without_launcher) == (False, True)


def test_a_job_was_stopped_when_its_hang_was_detected_where_dtprof_stopped_it() -> None:
    assert parse_manifest({"hang_detected_ns": 7, "stopped_on_hang": True}).stopped_on_hang_ns == 7
    assert parse_manifest({"hang_detected_ns": 7}).stopped_on_hang_ns is None
    assert parse_manifest(json.loads("{}")) == Manifest()
