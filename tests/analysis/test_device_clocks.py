"""A slow rank is explained by the clock of its GPU where that accounts for it, and by nothing where it is not known."""

from typing import Any

import numpy as np
import pytest

from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.nodes import node_samples
from dtprof.records.nodes.node_reader import NodeSamples, table_type
from dtprof.report.documents.summary_json import summary_json
from dtprof.report.text.summary_text import summary_text
from tests.builders import START_NS, MemoryRun, RankBuilder

MS = 1_000_000
S = 1_000_000_000
STEP = S
NUM_STEPS = 12
HEAT, POWER = 0x40, 0x4


def gpu_rows(**values: float) -> Any:
    """Return a sample of a busy GPU every second of the run; what is not given is not known."""
    rows = np.zeros(NUM_STEPS + 2, table_type(node_samples.GPU))
    for field in node_samples.GPU:
        rows[field.name] = np.nan
    rows["t_ns"] = START_NS + np.arange(len(rows)) * S
    for name, value in (
        {"utilisation": 1.0, "sm_clock_mhz": 1980.0, "throttle_reasons": 0, "lost": 0} | values
    ).items():
        rows[name] = value
    return rows


def node(gpus: dict[int, Any], **fields: Any) -> dict[str, NodeSamples]:
    description = {"gpus": [{"index": index, "uuid": f"GPU-{index}"} for index in gpus]}
    return {"host-a": NodeSamples(node="host-a", boot_id="boot-a", description=description, gpus=gpus, **fields)}


def summary_of(samples: dict[str, NodeSamples], *, late_ms: int = 200, phase: str = "forward") -> Summary:
    """Summarise a job of 4 ranks on GPUs 0 to 3; rank 2 works longer in a phase than the 500 ms of the others."""
    ranks = [RankBuilder(i, world_size=4, device_uuid=f"GPU-{i}") for i in range(4)]
    for step in range(NUM_STEPS):
        begin = step * STEP
        for rank in ranks:
            worked = begin + (500 + (late_ms if rank.rank == 2 else 0)) * MS
            rank.span(phase, begin, worked - 50 * MS)
            rank.span("backward", worked - 50 * MS, worked)
            rank.op("all_reduce", worked, begin + (510 + late_ms) * MS)
            rank.span("optimizer", begin + 950 * MS, begin + STEP)
    return summarise(MemoryRun(ranks, samples=samples))


def cause_of(samples: dict[str, NodeSamples], **job: Any) -> str | None:
    (straggler,) = summary_of(samples, **job).stragglers
    assert straggler.rank == 2
    return straggler.cause


def four(slow: Any) -> dict[int, Any]:
    return {index: slow if index == 2 else gpu_rows() for index in range(4)}


def test_clock_that_heat_holds_down_is_the_cause() -> None:
    # The others work 550 ms of a step, optimizer included; the rank 200 more, 36 %. At 1,400 of 1,980 MHz work takes
    # 41 % longer.
    samples = node(four(gpu_rows(sm_clock_mhz=1400, throttle_reasons=HEAT)))
    assert cause_of(samples) == "clock of its GPU: 1400 MHz, the others' 1980 MHz, held down by heat of its hardware"


@pytest.mark.parametrize(
    ("slow", "job"),
    [
        pytest.param({}, {}, id="as fast as the others"),
        pytest.param({"sm_clock_mhz": 1900, "throttle_reasons": POWER}, {}, id="4 % below"),
        pytest.param({"sm_clock_mhz": 1800}, {"late_ms": 440}, id="explains an eighth of it"),
        pytest.param({"sm_clock_mhz": 1400, "utilisation": 0.1}, {}, id="low because idle"),
        pytest.param({"sm_clock_mhz": np.nan}, {}, id="not known"),
    ],
)
def test_clock_is_not_the_cause(slow: dict[str, float], job: dict[str, Any]) -> None:
    assert cause_of(node(four(gpu_rows(**slow))), **job) is None


def test_host_work_is_not_explained_by_the_clock_of_a_device() -> None:
    samples = node(four(gpu_rows(sm_clock_mhz=1400, throttle_reasons=HEAT)))
    assert cause_of(samples, phase="data") == "input: it waits for its data loader"


@pytest.mark.parametrize(
    ("samples", "reason"),
    [
        ({}, "its node was not sampled"),
        (node({}, no_gpus_reason="NVML cannot be used: Driver Not Loaded"), "NVML cannot be used: Driver Not Loaded"),
        (
            node({0: gpu_rows()}),
            "NVML knows no whole GPU of this UUID: a MIG slice has no clock of its own",
        ),
        (node(four(gpu_rows(utilisation=np.nan))), "fewer than 3 samples were taken while it worked"),
    ],
    ids=["no samples", "no NVML", "MIG", "no utilisation"],
)
def test_unknown_clock_is_a_caveat_with_its_reason(samples: dict[str, NodeSamples], reason: str) -> None:
    summary = summary_of(samples)
    assert [straggler.cause for straggler in summary.stragglers] == [None]
    said = [caveat for caveat in summary.cannot_tell if caveat.startswith("stragglers:")]
    assert said == [f"stragglers: whether the clock of a GPU slows rank 2 down is not known: {reason}"]


def test_device_that_vanishes_is_a_caveat_with_its_xid() -> None:
    lost = gpu_rows()
    lost["last_xid"][4:] = 79
    lost["lost"][5:] = 1
    for name in ("utilisation", "sm_clock_mhz"):
        lost[name][5:] = np.nan
    summary = summary_of(node(four(lost), gpu_problems=("GPU 3 is divided into MIG slices",)))
    said = [caveat for caveat in summary.cannot_tell if caveat.startswith("devices:")]
    assert said == [
        "devices: host-a: GPU 3 is divided into MIG slices",
        "devices: host-a: the driver lost GPU 2 (Xid 79); nothing is known of it from then on",
    ]


def test_job_without_devices_reads_no_samples() -> None:
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        rank.span("backward", 0, 10 * MS)
    assert not any("GPU" in caveat for caveat in summarise(MemoryRun(ranks, samples=node({}))).cannot_tell)


def test_use_of_gpus_is_in_json_text_and_report() -> None:
    # Of the 14 samples of GPU 2, one a second, 7 at work were held down by heat; errors and NVLink count up from 5.
    hot = gpu_rows(sm_clock_mhz=1400.0, temperature_c=88.0, power_w=600.0)
    hot["throttle_reasons"][::2] = HEAT
    hot["ecc_corrected"] = 5 + np.arange(len(hot))
    hot["ecc_uncorrected"] = 0
    hot["nvlink_sent_bytes"] = 5 + 1e9 * np.arange(len(hot))
    hot["xid_errors"], hot["last_xid"] = 1, 94
    summary = summary_of(node(four(hot)))
    document = summary_json(summary)
    known, of_rank_2 = document["gpus"][0], document["gpus"][2]
    assert of_rank_2 == {
        "host": "host-a",
        "device": "gpu 2",
        "name": None,
        "ranks": (2,),
        "utilisation": 1.0,
        "sm_clock_mhz": 1400.0,
        "held_down": {"heat of its hardware": 0.5},
        "power_w": 600.0,
        "temperature_c": 88.0,
        "nvlink_bytes_per_s": 1e9,
        "ecc_corrected": 13,
        "ecc_uncorrected": 0,
        "xid_errors": 1,
        "last_xid": 94,
        "lost": False,
    }
    assert (known["temperature_c"], known["ecc_corrected"], known["held_down"]) == (None, None, {})
    text = summary_text(summary)
    assert "gpus        4 GPUs sampled: 100.0 % busy, 1400 to 1980 MHz at work, up to 88 °C" in text
    assert "gpu 2 of host-a: held down by heat of its hardware for 50.0 % of its" in text
    assert "Xid 94" in text


def test_fragmentation_is_what_was_reserved_and_not_used() -> None:
    ranks = [RankBuilder(i, world_size=1, device_uuid="GPU-0") for i in range(1)]
    for name, size in (("cuda_peak_allocated_bytes", 6 << 30), ("cuda_peak_reserved_bytes", 8 << 30)):
        ranks[0].sample(name, MS, size)
    summary = summarise(MemoryRun(ranks))
    assert summary_json(summary)["ranks"][0]["memory"]["fragmentation"] == 0.25
    assert "6.0 GB on rank 0, fragmentation 25.0 %" in summary_text(summary) or "fragmentation 25.0 %" in summary_text(
        summary
    )
