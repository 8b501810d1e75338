"""simccl on 2 ranks: collectives do what they are defined to do, and take the time that was injected."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests import jobs

pytestmark = pytest.mark.jobs


def printed_by(folder: Path, program: str) -> list[dict[str, Any]]:
    """Run a program on 2 ranks; return the objects that they printed."""
    job = jobs.finished(jobs.forked(2, "-m", f"tests.accelerator.programs.{program}"), folder)
    assert job.process.returncode == 0, job.stderr
    return [json.loads(line) for line in job.stdout.splitlines() if line.startswith("{")]


def test_times_on_the_streams_are_the_injected_ones(tmp_path: Path) -> None:
    # Transfer 10 ms, over 4 ms of compute; "late": the stream of rank 1 gets there 5 ms later.
    first, second = sorted(printed_by(tmp_path, "collectives"), key=lambda printed: printed["rank"])

    def times(call: float, exposed: float, wait: float) -> dict[str, Any]:
        return {"call": call, "exposed": exposed, "wait": wait, "transfer": 10, "completed_when_wait_returned": False}

    assert first["async"] == second["async"] == times(0, 10 - 4, 0)
    # The stream of rank 0 stands in the wait for the 5 ms as well; rank 1 has nobody to wait for.
    assert first["async_late"] == times(0, 5 + 10 - 4, 5)
    assert second["async_late"] == times(0, 10 - 4, 0)
    # On the caller's stream the compute comes after it.
    assert first["sync_late"] == times(5 + 10, 0, 5)
    assert second["sync_late"] == times(10, 0, 0)
    assert first["message"] == times(0, 5 + 10 - 4, 5)
    assert second["message"] == times(0, 10 - 4, 0)


def test_collective_that_never_completes_stops_the_host_at_item_only(tmp_path: Path) -> None:
    printed = printed_by(tmp_path, "hanging")
    assert len(printed) == 2 * 3
    for seen in printed:
        # Who skipped it goes on; who is in it, or stands before it, does not.
        goes_on = seen["fault"] == "skipped" and seen["rank"] == 1
        assert seen["item_returned"] == goes_on, seen
        assert seen["ran_on_ms"] < 400, seen
        assert not seen["completed"], seen


def test_layouts_train_as_on_gloo(tmp_path: Path) -> None:
    printed = printed_by(tmp_path, "layouts")
    assert len(printed) == 2 * 4
    for losses in printed:
        assert losses["sim"] == pytest.approx(losses["cpu"], abs=1e-5), losses
        assert losses["blocking"] == {}
        has_losses = losses["layout"] != "pipeline" or losses["rank"] == 1
        assert len(losses["sim"]) == (3 if has_losses else 0)
