"""The reference trainer on NCCL, 2 ranks on one GPU: a ring of messages, and state that lies on the host."""

import json
from pathlib import Path

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.records import codes, schema
from dtprof.records.reader import Run, open_run
from dtprof.records.tables import UNKNOWN_NS
from tests import jobs

pytestmark = pytest.mark.gpu

PLAIN = ("--preset", "tiny", "--steps", "8", "--share-devices")


def train(folder: Path, *layout: str) -> tuple[Run, list[float]]:
    """Record the trainer; return the run and the loss of each step."""
    program = jobs.torchrun(2, "-m", "reference_trainer", *PLAIN, "--metrics", str(folder / "metrics.jsonl"), *layout)
    jobs.recorded(folder / "run", program)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return open_run(folder / "run"), [json.loads(line)["loss"] for line in lines]


def test_ring_of_messages_has_its_times_and_gives_the_losses_of_gathered_keys(tmp_path: Path) -> None:
    for name in ("gathered", "ring"):
        (tmp_path / name).mkdir()
    _, gathered = train(tmp_path / "gathered", "--cp", "2")
    run, losses = train(tmp_path / "ring", "--cp", "2", "--cp-attention", "ring")
    assert losses == pytest.approx(gathered, rel=1e-3)
    for tables in run.load_all():
        assert (tables.errors, tables.problems) == (0, ())
        rows = tables.device_intervals[tables.device_intervals["kind"] == codes.DEVICE_OPERATION]
        messages = rows[[tables.ops[row["op"]] in ("send", "recv") for row in rows]]
        assert len(messages) >= 8 * 2  # of each step at least one there and one back
        assert (messages["end_ns"] != UNKNOWN_NS).mean() >= 0.99
        assert (messages["flags"] & schema.DEVICE_FLAG["several"] != 0).all()
    assert all(rank.partition_ns is not None for rank in summarise(run).ranks)


def test_state_on_the_host_gives_the_losses_of_state_on_the_device(tmp_path: Path) -> None:
    for name in ("device", "host"):
        (tmp_path / name).mkdir()
    _, on_device = train(tmp_path / "device")
    run, losses = train(tmp_path / "host", "--offload", "both")
    assert losses == pytest.approx(on_device, rel=1e-3)
    for tables in run.load_all():
        assert (tables.errors, tables.problems) == (0, ())
        phases = tables.device_intervals[tables.device_intervals["kind"] == codes.DEVICE_PHASE]
        names = {tables.ops[row["op"]] for row in phases if row["end_ns"] != UNKNOWN_NS}
        assert {"forward", "backward", "optimizer"} <= names
