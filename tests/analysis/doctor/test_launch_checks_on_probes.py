"""Every check of a launch on probe results made by hand: a faulty launch is found, a sound one is not."""

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from dtprof.analysis.doctor.doctor_case import DoctorCase, Endpoint, LaunchFinding, PipelineFigures
from dtprof.analysis.doctor.doctor_judgement import KINDS, Earlier, judge
from dtprof.analysis.doctor.launch_checks import read_pipeline
from dtprof.records.rank_probes import CollectiveTimes, Interface, JointProbe, Link, RankProbe
from dtprof.report.documents.doctor_json import doctor_json
from dtprof.report.text.doctor_text import doctor_text

GIB = 1 << 30
VERSIONS = {"torch": "2.13.0", "python": "3.11.7", "dtprof": "0.1.0"}
Change = Callable[[DoctorCase], object]


def rank_probe(rank: int, *, hosts: int = 3, per_host: int = 2) -> RankProbe:
    host, local = divmod(rank, per_host)
    return RankProbe(
        rank=rank,
        world_size=hosts * per_host,
        local_rank=local,
        local_world_size=per_host,
        host=f"node{host}",
        pid=100 + rank,
        stage="done",
        launcher="torchrun",
        launcher_pid=10 + host,
        master="node0",
        master_port=29500,
        master_addresses=["10.0.0.1"],
        own_addresses=[f"10.0.0.{1 + host}"],
        versions=VERSIONS,
        settings={"OMP_NUM_THREADS": "1"},
        interfaces=[
            Interface(name="lo", address="127.0.0.1", is_loopback=True),
            Interface(name="eth0", address=f"10.0.0.{1 + host}", megabits_per_s=100_000),
        ],
        shared_memory_bytes=8 * GIB,
        shared_memory_free_bytes=8 * GIB,
        open_files=65536,
        locked_memory_bytes=-1,
        processes=-1,
        user_threads=500,
        memory_available_bytes=64 * GIB,
        cores=[0, 1, 2, 3],
        threads=1,
        disk_path="/scratch/run",
        disk_free_bytes=100 * GIB,
        disk_mb_per_s=800.0,
        disk_sync_ns=2e6,
        devices=[f"gpu-{host}-0", f"gpu-{host}-1"],
        gpus=[{"index": 0, "temperature_c": 40, "ecc_uncorrected": 0}, {"index": 1, "temperature_c": 41}]
        if local == 0
        else [],
        clock_offset_ns=5e12 if local == 0 else None,
        clock_error_ns=40_000.0 if local == 0 else None,
        clock_drift_ppm=3.0 if local == 0 else None,
        clock_drift_error_ppm=20.0 if local == 0 else None,
        wall_offset_ns=2e6 if local == 0 else None,
    )


def links_of(probes: list[RankProbe], slow: Callable[[str, str], float] = lambda *_: 1.0) -> list[Link]:
    """Return links of 10 GB/s within a host and 1 GB/s between hosts, times a factor."""
    return [
        Link(
            sender=a.rank,
            receiver=b.rank,
            gb_per_s=[(10.0 if a.host == b.host else 1.0) * slow(a.host, b.host) * share for share in (0.9, 1.0, 0.6)],
            latency_ns=[20e3 if a.host == b.host else 60e3],
        )
        for a in probes
        for b in probes
        if a is not b
    ]


def sound_case(*, hosts: int = 3, per_host: int = 2) -> DoctorCase:
    probes = [rank_probe(rank, hosts=hosts, per_host=per_host) for rank in range(hosts * per_host)]
    return DoctorCase(joint=JointProbe(rank=0, probes=probes, links=links_of(probes)))


def found(case: DoctorCase, kind: str) -> list[LaunchFinding]:
    return [finding for finding in judge(case).findings if finding.kind == kind]


def of_host(case: DoctorCase, host: str) -> list[RankProbe]:
    return [probe for probe in case.probes if probe.host == host]


def put(case: DoctorCase, host: str, **fields: object) -> None:
    for probe in of_host(case, host):
        for name, value in fields.items():
            setattr(probe, name, value)


def test_a_sound_launch_has_no_finding() -> None:
    result = judge(sound_case())
    assert result.findings == ()
    assert result.cannot_tell == ()
    assert result.clock_error_ns == 40_000.0
    assert "nothing found" in doctor_text(result)


def slow_node(case: DoctorCase) -> None:
    case.joint.links = links_of(case.probes, lambda a, b: 0.1 if a != b and "node2" in (a, b) else 1.0)


def slow_pair(case: DoctorCase) -> None:
    for link in case.joint.links:
        if {link.sender, link.receiver} == {0, 4}:
            link.gb_per_s = [0.2, 0.3, 0.25]


def late_pair(case: DoctorCase) -> None:
    for link in case.joint.links:
        if {link.sender, link.receiver} == {0, 4}:
            link.latency_ns = [2e6, 2.1e6]


def duplicate_rank(case: DoctorCase) -> None:
    case.probes.append(replace(case.probes[3], pid=999, host="node2"))
    del case.probes[5]


def other_rank_than_slurm(case: DoctorCase) -> None:
    for probe in case.probes:
        probe.launcher = "env"
        probe.variables = {"SLURM_PROCID": str(probe.rank), "SLURM_NTASKS": "6"}
    case.probes[5].variables["SLURM_PROCID"] = "4"


FAULTS: list[tuple[str, str, Change, tuple[str, ...], tuple[int, ...], str]] = [
    ("no-address", "error", lambda c: put(c, "node1", master=None), ("node1",), (2, 3), "no MASTER_ADDR"),
    ("missing-rank", "error", lambda c: c.probes.pop(3), (), (3,), "Rank 3 of 6 did not come"),
    ("rendezvous", "error", lambda c: put(c, "node1", stage="joining", error="timeout"), ("node1",), (2, 3), "timeout"),
    ("name-resolution", "error", lambda c: put(c, "node1", master_error="unknown"), ("node1",), (2, 3), "'node0'"),
    (
        "loopback-address",
        "error",
        lambda c: put(c, "node2", own_addresses=["127.0.1.1"]),
        ("node2",),
        (4, 5),
        "127.0.1.1",
    ),
    (
        "loopback-address",
        "error",
        lambda c: put(c, "node1", master_addresses=["127.0.0.1"]),
        ("node1",),
        (),
        "own host",
    ),
    (
        "unreachable-host",
        "error",
        lambda c: (
            put(c, "node1", unreachable={"node2": "10.0.0.3"}),
            put(c, "node0", unreachable={"node2": "10.0.0.3"}),
        ),
        ("node2",),
        (4, 5),
        "node2 is in most",
    ),
    (
        "interface",
        "error",
        lambda c: put(c, "node1", settings={"GLOO_SOCKET_IFNAME": "ib0"}),
        ("node1",),
        (2, 3),
        "'ib0'",
    ),
    (
        "interface",
        "error",
        lambda c: put(c, "node1", settings={"NCCL_SOCKET_IFNAME": "lo"}),
        ("node1",),
        (2, 3),
        "no other",
    ),
    (
        "interface-speed",
        "warning",
        lambda c: put(c, "node1", interfaces=[Interface(name="eth0", address="10.0.0.2", megabits_per_s=1000)]),
        ("node1",),
        (),
        "1,000 Mbit/s",
    ),
    (
        "version-mismatch",
        "error",
        lambda c: put(c, "node1", versions={**VERSIONS, "torch": "2.12.0"}),
        ("node1",),
        (2, 3),
        "2.12.0",
    ),
    (
        "environment-mismatch",
        "warning",
        lambda c: put(c, "node1", settings={}),
        ("node1",),
        (2, 3),
        "not set on ranks 2, 3",
    ),
    ("world-size", "error", lambda c: put(c, "node1", world_size=4), ("node1",), (2, 3), "4 on ranks 2, 3"),
    ("world-size", "error", duplicate_rank, ("node1", "node2"), (3,), "rank 3"),
    (
        "mixed-launchers",
        "error",
        lambda c: setattr(c.probes[0], "launcher_pid", 77),
        ("node0",),
        (0, 1),
        "several torchrun",
    ),
    ("mixed-launchers", "error", other_rank_than_slurm, ("node2",), (5,), "RANK is 5 where srun says 4"),
    (
        "device-mapping",
        "error",
        lambda c: put(c, "node1", devices=["gpu-1-0"]),
        ("node1",),
        (2, 3),
        "one device between",
    ),
    (
        "device-mapping",
        "error",
        lambda c: setattr(c.probes[3], "local_rank", 2),
        ("node1",),
        (3,),
        "beyond the 2 devices",
    ),
    (
        "gpu-health",
        "error",
        lambda c: c.probes[2].gpus.__setitem__(1, {"index": 1, "ecc_uncorrected": 2}),
        ("node1",),
        (3,),
        "2 memory errors",
    ),
    ("gpu-health", "error", lambda c: c.probes[2].gpus.pop(), ("node1",), (), "1 GPU, other hosts 2"),
    (
        "gpu-health",
        "warning",
        lambda c: c.probes[2].gpus[0].update(throttle_reasons=0x40),
        ("node1",),
        (2,),
        "held down",
    ),
    (
        "oversubscribed-cores",
        "warning",
        lambda c: put(c, "node1", threads=4),
        ("node1",),
        (2, 3),
        "4 threads each, on 4",
    ),
    ("oversubscribed-cores", "warning", lambda c: put(c, "node1", core_quota=1.0), ("node1",), (2, 3), "on 1 core:"),
    ("memory", "warning", lambda c: put(c, "node1", memory_available_bytes=GIB), ("node1",), (), "1.00 GiB"),
    ("shared-memory", "warning", lambda c: put(c, "node1", shared_memory_bytes=64 << 20), ("node1",), (), "64.0 MiB"),
    ("open-files", "warning", lambda c: put(c, "node1", open_files=256), ("node1",), (2, 3), "may need 536"),
    (
        "locked-memory",
        "warning",
        lambda c: put(c, "node1", has_infiniband=True, locked_memory_bytes=8 << 20),
        ("node1",),
        (),
        "8.00 MiB",
    ),
    ("process-limit", "warning", lambda c: put(c, "node1", processes=600), ("node1",), (), "600 threads, of which 500"),
    ("disk", "warning", lambda c: put(c, "node1", disk_error="Read-only file system"), ("node1",), (), "Read-only"),
    ("disk", "warning", lambda c: put(c, "node1", disk_free_bytes=100 << 20), ("node1",), (), "100 MiB free"),
    ("disk", "warning", lambda c: put(c, "node1", disk_mb_per_s=3.0), ("node1",), (), "3.0 MB/s"),
    ("clock-offset", "warning", lambda c: put(c, "node1", wall_offset_ns=-3e9), ("node1",), (), "3.00 s ahead of"),
    ("clock-drift", "warning", lambda c: put(c, "node1", clock_drift_ppm=-400.0), ("node1",), (), "-400 millionths"),
    ("clock-error", "warning", lambda c: put(c, "node1", clock_error_ns=5e6), ("node1",), (), "5.00 ms only"),
    ("slow-host", "warning", slow_node, ("node2",), (4, 5), "node2 sends and receives 0.1 GB/s at best"),
    ("slow-link", "warning", slow_pair, ("node0", "node2"), (0, 4), "0.3 GB/s at best"),
    ("slow-link", "warning", late_pair, ("node0", "node2"), (0, 4), "latency 2050 us"),
]


@pytest.mark.parametrize(("kind", "severity", "change", "hosts", "ranks", "words"), FAULTS)
def test_a_fault_is_found_with_its_hosts_and_ranks(
    kind: str, severity: str, change: Change, hosts: tuple[str, ...], ranks: tuple[int, ...], words: str
) -> None:
    case = sound_case()
    change(case)
    findings = found(case, kind)
    assert [(finding.severity, finding.hosts, finding.ranks) for finding in findings] == [(severity, hosts, ranks)]
    assert words in findings[0].summary
    assert findings[0].advice
    assert words.split()[0] in doctor_text(judge(case))


OF_THE_LAUNCH: list[tuple[str, str, DoctorCase, str]] = [
    ("no-rank", "error", replace(sound_case(), joint=JointProbe(rank=0), exit_status=1), "ended with status 1"),
    (
        "no-rank",
        "error",
        replace(sound_case(), joint=JointProbe(rank=0), exit_status=None, endpoint=Endpoint(host="node0", port=29400)),
        "rendezvous at node0:29400",
    ),
    (
        "name-resolution",
        "error",
        replace(sound_case(), endpoint=Endpoint(host="nodeX", port=1, error="unknown")),
        "'nodeX'",
    ),
    (
        "port-taken",
        "error",
        replace(sound_case(), endpoint=Endpoint(host="node0", port=29500, is_local=True, taken_by="by process 7")),
        "by process 7",
    ),
    (
        "few-microbatches",
        "warning",
        replace(sound_case(), pipeline=PipelineFigures(stages=4, microbatches=8)),
        "takes 27 %",
    ),
    (
        "uneven-data",
        "warning",
        replace(sound_case(), pipeline=PipelineFigures(samples=1201, batch=4)),
        "51 steps and others 50",
    ),
    (
        "uneven-data",
        "info",
        replace(sound_case(), pipeline=PipelineFigures(samples=1206, batch=4)),
        "smaller last batch",
    ),
]


@pytest.mark.parametrize(("kind", "severity", "case", "words"), OF_THE_LAUNCH)
def test_a_fault_of_the_launch_is_found(kind: str, severity: str, case: DoctorCase, words: str) -> None:
    findings = found(case, kind)
    assert [finding.severity for finding in findings] == [severity]
    assert words in findings[0].summary


@pytest.mark.parametrize(
    "pipeline",
    [
        PipelineFigures(stages=4, microbatches=16),
        PipelineFigures(samples=1200, batch=4),
        PipelineFigures(stages=1, microbatches=1),
    ],
)
def test_sound_figures_of_the_program_are_no_finding(pipeline: PipelineFigures) -> None:
    assert judge(replace(sound_case(), pipeline=pipeline)).findings == ()


def test_hosts_with_other_numbers_of_ranks_are_named() -> None:
    case = sound_case()
    extra = replace(case.probes[5], rank=6, pid=106, local_rank=2, cores=[0, 1, 2, 3], devices=[])
    case.probes.append(extra)
    for probe in case.probes:
        probe.world_size = 7
    (finding,) = found(case, "uneven-hosts")
    assert finding.hosts == ("node2",)


def test_one_process_without_variables_is_said_to_show_one_rank_only() -> None:
    case = DoctorCase(joint=JointProbe(rank=0, probes=[replace(rank_probe(0, hosts=1, per_host=1), launcher="none")]))
    assert [finding.kind for finding in judge(case).findings] == ["single-rank"]
    assert judge(case).faults == ()


def test_every_kind_is_found_in_one_of_these_tests() -> None:
    tried = {kind for kind, *_ in FAULTS} | {kind for kind, *_ in OF_THE_LAUNCH}
    assert set(KINDS) - tried == {"uneven-hosts", "single-rank", "slower-than-before"}


def test_two_hosts_are_compared_with_earlier_measurements_only() -> None:
    case = sound_case(hosts=2, per_host=1)
    earlier = Earlier(gb_per_s={("gloo", "node0", "node1"): 2.0, ("gloo", "node1", "node0"): 1.2}, count=3)
    (finding,) = judge(case, earlier).findings
    assert finding.kind == "slower-than-before"
    assert finding.hosts == ("node0", "node1")
    assert "From node0 to node1 pass 1 GB/s at best, 2 GB/s in 3 earlier measurements." in finding.summary
    assert any("cannot be compared" in reason for reason in judge(case).cannot_tell)


def test_noise_is_no_slow_link() -> None:
    case = sound_case()
    for link in case.joint.links:
        if link.sender == 0:
            link.gb_per_s = [0.1 * max(link.gb_per_s), 0.8 * max(link.gb_per_s)]  # load made one repetition slow
    assert judge(case).findings == ()


def test_bus_bandwidth_is_that_of_nccl_tests() -> None:
    """1 MB in 1 ms is an algorithm bandwidth of 1 GB/s; the factors of 4 ranks are 1.5, 0.75 and 1; gather has none."""
    case = sound_case(hosts=2)
    case.joint.collectives = [
        CollectiveTimes(group="0", ranks=[0, 1, 2, 3], op=op, nbytes=1_000_000, times_ns=[1e6, 9e6, 1e6])
        for op in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather")
    ]
    rates = [row.busbw_gb_per_s for row in judge(case).bandwidth]
    assert rates == pytest.approx([1.5, 0.75, 0.75, 0.75, 1.0, 1.0])


def test_json_has_the_fields_of_the_contract() -> None:
    case = sound_case()
    slow_pair(case)
    case.joint.collectives = [CollectiveTimes(group="0", ranks=[0, 1], op="all_reduce", nbytes=8, times_ns=[1000.0])]
    document = json.loads(json.dumps(doctor_json(judge(case))))
    assert document["schema"] == 1
    assert {"kind", "severity", "hosts", "ranks", "summary", "advice"} <= document["findings"][0].keys()
    assert {"group": "0", "op": "all_reduce", "bytes": 8, "busbw_gb_per_s": 0.008}.items() <= document["bandwidth"][
        0
    ].items()
    first = document["pairs"][0]
    assert {"from": 0, "to": 1, "gb_per_s": 10.0, "latency_us": 20.0}.items() <= first.items()
    assert document["cannot_tell"] == []


def test_what_could_not_be_measured_is_told() -> None:
    case = sound_case()
    case.joint.links = []
    case.probes[2].clock_reason = "no answer over UDP from 10.0.0.1"
    reasons = judge(case).cannot_tell
    assert "bandwidth: the ranks did not join a group" in reasons
    assert "clock of node1: no answer over UDP from 10.0.0.1" in reasons


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("train.py --pp 4 --microbatches 8", PipelineFigures(stages=4, microbatches=8)),
        ("train.py --pipeline-model-parallel-size=2 --num-microbatches=3", PipelineFigures(stages=2, microbatches=3)),
        ("train.py --batch-size 4 --samples 100", PipelineFigures(samples=100, batch=4)),
        ("train.py --pp auto --n-microbatches -1", PipelineFigures()),
        ("train.py --pp", PipelineFigures()),
    ],
)
def test_figures_of_the_program_are_read_from_its_arguments(words: str, expected: PipelineFigures) -> None:
    assert read_pipeline(words.split()) == expected
