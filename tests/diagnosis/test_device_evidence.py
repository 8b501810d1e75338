"""What NVML, logs and stacks say of the devices of a stalled job is evidence, and what they do not say is named."""

from pathlib import Path

import pytest

from dtprof.diagnosis.job_state import DEVICE_CALL, DeviceHealth, JobState
from dtprof.diagnosis.sources.device_health import find_device_health
from dtprof.records.nodes.node_samples import GPU, HOST, Sample, SampleFile, Value
from dtprof.records.schema import FLAG
from tests.diagnosis.judging import build_job, found_by, ranks_in_step

FOLLOWED = FLAG["device"] | FLAG["followed"] | FLAG["no_work"]


def held_up_rank(**job: object) -> JobState:
    """Return a job in which the device of rank 1 does not come to an operation that the others have begun."""
    ranks = ranks_in_step(3, 1)
    for rank in ranks:
        rank.op("all_reduce", 1100, returned=1101, site=rank.site("all_reduce", line=30), nbytes=64, flags=FOLLOWED)
        if rank.rank != 1:
            rank.device_interval("operation", "all_reduce", 1150, None, host=(1100, 0), seq=2)
    ranks[1].device_interval("phase", "backward", 1050, None)
    return build_job(ranks, exit_status=None, **job)


def sampled(folder: Path, gpus: dict[int, dict[str, Value]], **description: object) -> Path:
    """Write one sample of a node with these values of its GPUs."""
    file = SampleFile(folder / "node-a", {"boot_id": "boot-a", "period_s": 1.0, **description})
    rows = {number: [values.get(field.name) for field in GPU] for number, values in gpus.items()}
    file.append(Sample(t_ns=1, host=[None] * len(HOST), cores=[], gpus=rows, processes={}))
    return folder


def test_a_stream_that_no_operation_holds_up_is_held_up_by_compute_and_the_phase_is_named() -> None:
    (finding,) = found_by("device_stall", held_up_rank())
    assert finding.culprit_ranks == (1,)
    assert "no operation of a group, such as a kernel that does not end" in finding.summary
    assert "it was begun by the devices of ranks 0, 2, not by those of rank 1" in finding.evidence
    assert any("rank 1: its device is in phase backward" in fact for fact in finding.evidence)


def test_what_nvml_says_of_the_culprits_host_is_evidence() -> None:
    health = {
        rank: DeviceHealth(troubles=("GPU 3 of a: Xid 79 (the GPU has fallen off the bus)",)) for rank in range(3)
    }
    (finding,) = found_by("device_stall", held_up_rank(find_device_health=lambda: health))
    assert "GPU 3 of a: Xid 79 (the GPU has fallen off the bus)" in finding.evidence
    assert finding.leaves_open == ()


def test_why_the_health_of_devices_is_not_known_is_said_once() -> None:
    health = dict.fromkeys(range(3), DeviceHealth(reason="no GPUs were sampled"))
    (finding,) = found_by("device_stall", held_up_rank(find_device_health=lambda: health))
    assert finding.leaves_open == ("the health of these devices is not known: no GPUs were sampled",)


@pytest.mark.parametrize(
    ("gpus", "description", "expected"),
    [
        ({}, {"no_gpus_reason": "NVML cannot be used: driver"}, DeviceHealth(reason="NVML cannot be used: driver")),
        ({0: {"xid_errors": 0, "ecc_uncorrected": 0}}, {}, DeviceHealth()),
        (
            {0: {"xid_errors": 0}, 1: {"xid_errors": 2, "last_xid": 48, "ecc_uncorrected": 3}},
            {},
            DeviceHealth(troubles=("GPU 1 of a: Xid 48 (double-bit ECC error), 3 uncorrected ECC errors",)),
        ),
        (
            {0: {"xid_errors": None}},
            {},
            DeviceHealth(reason="NVML reports no Xid events here; look in the kernel log (dmesg)"),
        ),
    ],
)
def test_health_is_read_from_the_newest_sample_of_the_node(
    tmp_path: Path, gpus: dict[int, dict[str, Value]], description: dict[str, object], expected: DeviceHealth
) -> None:
    (tmp_path / "node-a").mkdir()
    run = sampled(tmp_path, gpus, **description)
    ranks = held_up_rank().ranks.values()
    assert find_device_health(run, ranks, {0: "boot-a", 1: "boot-b"})[0] == expected
    assert find_device_health(run, ranks, {1: "boot-b"})[1] == DeviceHealth(reason="no GPUs were sampled")


@pytest.mark.parametrize(
    ("function", "is_call"),
    [
        ("cudaStreamSynchronize", True),
        ("cuCtxSynchronize", True),
        ("ncclCommInitRankConfig", True),
        ("hipEventSynchronize", True),
        ("simStreamSynchronize", True),
        ("current_stream", False),
        ("c10d::ProcessGroup::barrier", False),
        ("pthread_cond_wait", False),
    ],
)
def test_functions_of_drivers_and_nccl_are_known(function: str, is_call: bool) -> None:
    assert bool(DEVICE_CALL.match(function)) is is_call
