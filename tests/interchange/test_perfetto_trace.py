"""The .pftrace file, read back with Perfetto's own protos."""

import json
import tarfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

from dtprof.analysis.results import Summary
from dtprof.analysis.timeline.operation_detail import RunDetail, read_detail
from dtprof.interchange.exporters import perfetto_trace
from dtprof.interchange.exporters.perfetto_archive import (
    ARROWS,
    MANIFEST,
    HostFile,
    describe_hosts,
    write_perfetto_archive,
)
from dtprof.interchange.exporters.perfetto_trace import write_perfetto
from dtprof.records.reader import open_run
from tests.builders import START_NS, WALL_CLOCK_NS, MemoryRun, RankBuilder
from tests.interchange.reading_traces import Slice, assert_figures_equal, assert_no_overlap
from tests.synthetic import HostClock, Job, generate

DAY_NS = 86_400_000_000_000


@dataclass
class Read:
    """A file as a viewer understands it."""

    processes: dict[int, str] = field(default_factory=dict)
    slices: list[Slice] = field(default_factory=list)
    lanes: list[int] = field(default_factory=list)
    flows: dict[int, list[Slice]] = field(default_factory=lambda: defaultdict(list))
    open: list[tuple[str, str]] = field(default_factory=list)
    counters: dict[tuple[int, str], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    instants: list[tuple[int, str]] = field(default_factory=list)
    clocks: list[dict[int, int]] = field(default_factory=list)


def read(path: Path) -> Read:
    """Follow the packets as Perfetto does: texts by sequence, slices by track, in the order of time."""
    trace = protos.Trace()
    trace.ParseFromString(path.read_bytes())
    found, tracks, texts = Read(), {}, defaultdict(dict)
    stacks: dict[int, list[tuple[Any, dict[str, object], str]]] = defaultdict(list)
    for packet in trace.packet:
        if packet.HasField("track_descriptor"):
            one = packet.track_descriptor
            tracks[one.uuid] = one
            if one.HasField("process"):
                found.processes[one.process.pid] = one.process.process_name
        if packet.HasField("clock_snapshot"):
            found.clocks.append({clock.clock_id: clock.timestamp for clock in packet.clock_snapshot.clocks})
        if packet.HasField("interned_data"):
            assert packet.sequence_flags & protos.TracePacket.SEQ_INCREMENTAL_STATE_CLEARED
            own = texts[packet.trusted_packet_sequence_id]
            own |= {("event", row.iid): row.name for row in packet.interned_data.event_names}
            own |= {("name", row.iid): row.name for row in packet.interned_data.debug_annotation_names}
            values = packet.interned_data.debug_annotation_string_values
            own |= {("value", row.iid): row.str.decode() for row in values}
    events = [packet for packet in trace.packet if packet.HasField("track_event")]
    for packet in sorted(events, key=lambda packet: packet.timestamp):  # stable, as Perfetto's
        event, own = packet.track_event, texts[packet.trusted_packet_sequence_id]
        track = tracks[event.track_uuid]
        rank = tracks[track.parent_uuid or track.uuid].process.pid - 1
        if event.type == protos.TrackEvent.TYPE_COUNTER:
            found.counters[rank, track.name].append((packet.timestamp, event.counter_value))
        elif event.type == protos.TrackEvent.TYPE_INSTANT:
            found.instants.append((packet.timestamp, event.name))
        elif event.type == protos.TrackEvent.TYPE_SLICE_BEGIN:
            arguments = {
                own["name", row.name_iid]: row.int_value
                if row.HasField("int_value")
                else own["value", row.string_value_iid]
                for row in event.debug_annotations
            }
            stacks[event.track_uuid].append((packet, arguments, own["event", event.name_iid]))
        else:
            started, arguments, name = stacks[event.track_uuid].pop()
            done = Slice(
                rank=rank,
                track=track.name,
                name=name,
                begin_ns=started.timestamp,
                end_ns=packet.timestamp,
                arguments=arguments,
            )
            found.slices.append(done)
            found.lanes.append(event.track_uuid)
            for flow in (*started.track_event.flow_ids, *event.flow_ids):
                found.flows[flow].append(done)
    found.open = [(tracks[uuid].name, name) for uuid, left in stacks.items() for _, _, name in left]
    return found


@pytest.fixture(scope="module")
def trace(detail: RunDetail, tmp_path_factory: pytest.TempPathFactory) -> Read:
    path = tmp_path_factory.mktemp("perfetto") / "run.pftrace"
    assert write_perfetto(detail, path) == []
    return read(path)


def test_figures_are_those_of_the_summary(trace: Read, summary: Summary, used: range) -> None:
    assert_figures_equal(trace.slices, summary, used)
    assert_no_overlap(trace.slices, trace.lanes)
    assert trace.open == []


def test_a_rank_is_a_process_with_its_place_on_each_axis_and_its_stage(trace: Read) -> None:
    assert set(trace.processes) == {1, 2, 3, 4, 5, 6, 7, 8}
    assert trace.processes[8].startswith("rank 7")
    for axis in ("dp 1", "tp 1", "pp 1", "stage 1"):
        assert axis in trace.processes[8]
    assert {one.track for one in trace.slices} >= {"stage 0", "stage 1", "dp", "tp", "pp send", "pp recv"}


def test_members_of_a_collective_are_joined_and_sends_with_their_receives(trace: Read, summary: Summary) -> None:
    instance_rows = [slices for slices in trace.flows.values() if len(slices) > 1]
    messages = [slices for slices in instance_rows if {one.name for one in slices} == {"send", "recv"}]
    sends = [one for one in trace.slices if one.name == "send"]
    assert len(messages) == len(sends) > 0
    for one, other in messages:
        send, receive = (one, other) if one.name == "send" else (other, one)
        assert send.arguments["peer"] == receive.rank
        assert receive.arguments["peer"] == send.rank
        assert receive.end_ns > send.begin_ns
    collectives = [slices for slices in instance_rows if slices not in messages]
    ranks = {group.name: set(group.ranks) for group in summary.groups}
    for slices in collectives:
        assert len({(one.name, one.arguments["position"]) for one in slices}) == 1
        group = str(slices[0].arguments["group"]).split(" ")[0]
        assert {one.rank for one in slices} == ranks[group]
    joined = sum(map(len, instance_rows))
    assert joined == sum(1 for one in trace.slices if "wait_ns" in one.arguments)


def two_ranks() -> list[RankBuilder]:
    """The second rank leaves its last all_reduce to the first; a message is under way."""
    ranks = [RankBuilder(0, world_size=2), RankBuilder(1, world_size=2, host="host-b")]
    for rank in ranks:
        for step in range(4):
            rank.span("backward", 100 * step, 100 * step + 50)
            rank.op("all_reduce", 100 * step + 60, 100 * step + 80, nbytes=8, api="all_reduce <b>")
            rank.span("optimizer", 100 * step + 80, 100 * step + 90)
            rank.sample("rss_bytes", 100 * step + 90, 1000 * step)
    ranks[0].op("all_reduce", 500)
    ranks[1].exception(510, message="lost\N{SNOWMAN}")
    return ranks


def test_what_never_ended_has_no_end_and_exceptions_are_instants(out: Path) -> None:
    write_perfetto(read_detail(MemoryRun(two_ranks())), out)
    found = read(out)
    assert found.open == [("default_pg", "all_reduce")]
    assert found.instants == [(START_NS + 510, "RuntimeError")]
    assert found.counters[0, "process RSS"] == [(START_NS + 100 * step + 90, 1000 * step) for step in range(4)]
    assert {clock[1] - clock[6] for clock in found.clocks} == {WALL_CLOCK_NS - START_NS}


def test_what_is_not_known_is_said_to_be_not_known(out: Path) -> None:
    ranks = [RankBuilder(0, world_size=2)]  # the other left no log: when it arrived is not known
    for step in range(3):
        ranks[0].span("backward", 100 * step, 100 * step + 50)
        ranks[0].op("all_reduce", 100 * step + 60, 100 * step + 80, nbytes=1 << step * 12)
        ranks[0].span("optimizer", 100 * step + 80, 100 * step + 90)
    write_perfetto(read_detail(MemoryRun(ranks)), out)
    found = [one for one in read(out).slices if one.name == "all_reduce"]
    assert [one.arguments["wait_ns"] for one in found] == ["-"] * 3
    assert [one.arguments["exposed_ns"] for one in found] == [20] * 3
    assert [one.arguments["bytes"] for one in found] == [1, 1 << 12, 1 << 24]


def test_a_file_too_large_is_cut_to_the_newest_steps_and_says_so(
    detail: RunDetail, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perfetto_trace, "MAX_EVENTS", detail.extent.events // 2)
    (said,) = write_perfetto(detail, out)
    assert "steps 5 to 6 of 2 to 6 are in it" in said
    assert "--steps A:B" in said
    steps = {one.arguments["step"] for one in read(out).slices if one.name == "all_reduce"}
    assert min(int(str(step)) for step in steps) >= 5
    assert out.stat().st_size < perfetto_trace.MAX_BYTES


def test_an_event_takes_less_than_is_reckoned_with(detail: RunDetail, out: Path) -> None:
    write_perfetto(detail, out)
    assert out.stat().st_size < detail.extent.events * perfetto_trace.BYTES_AN_EVENT


@pytest.fixture(scope="module")
def on_hosts(tmp_path_factory: pytest.TempPathFactory) -> RunDetail:
    """Three hosts of two ranks: the clock of the second is a day ahead and runs too fast, the third's 2 ms behind."""
    folder = tmp_path_factory.mktemp("hosts") / "run"
    clocks = {1: HostClock(offset_ns=DAY_NS, drift_ppm=40), 2: HostClock(offset_ns=-2_000_000)}
    generate(folder, Job(tp=2, dp=3, steps=4, ranks_per_host=2, clocks=clocks))
    return read_detail(open_run(folder))


def test_files_of_an_archive_with_the_offsets_of_its_manifest_are_the_one_file(on_hosts: RunDetail, out: Path) -> None:
    assert write_perfetto(on_hosts, out) == []
    together = {(one.rank, one.track, one.name, one.begin_ns, one.end_ns) for one in read(out).slices}
    assert write_perfetto_archive(on_hosts, out.with_suffix(".tar")) == [ARROWS]
    with tarfile.open(out.with_suffix(".tar")) as archive:
        archive.extractall(out.parent / "files", filter="data")
        assert archive.getnames()[0] == MANIFEST
    text = (out.parent / "files" / MANIFEST).read_text(encoding="utf-8")
    assert "".join(text.split()).startswith('{"perfetto_manifest"')  # Perfetto knows it by that
    manifest = json.loads(text)["perfetto_manifest"]
    first, *others = manifest["files"]
    assert manifest["version"] == 1
    assert manifest["trace_time"] == {"clock": "BOOTTIME", "file": first["path"]}
    assert "clocks" not in first
    assert len({one["machine"]["name"] for one in manifest["files"]}) == 3
    apart = set()
    for entry in manifest["files"]:
        trace = read(out.parent / "files" / entry["path"])
        assert trace.clocks == []  # else Perfetto believes wall clocks
        assert all(entry["machine"]["name"] in name for name in trace.processes.values())
        offset_ns = entry["clocks"]["offset_ns"] if entry is not first else 0
        apart |= {
            (one.rank, one.track, one.name, one.begin_ns + offset_ns, one.end_ns + offset_ns) for one in trace.slices
        }
    assert apart == together
    for entry, truth, within in zip(others, (-DAY_NS, 2_000_000), (1_000_000_000, 10_000), strict=True):
        assert entry["clocks"]["sync_to"] == {"file": first["path"], "clock": "BOOTTIME"}
        assert entry["clocks"]["clock"] == "BOOTTIME"
        assert abs(entry["clocks"]["offset_ns"] - truth) < within


def test_a_host_whose_clock_is_not_known_is_placed_by_its_wall_clock() -> None:
    known = HostFile(name="a.pftrace", host="a", offset_ns=0, to_wall_ns=1_000)
    lost = HostFile(name="b.pftrace", host="b", offset_ns=None, to_wall_ns=1_700)
    files = describe_hosts("run", [known, lost])["perfetto_manifest"]["files"]
    assert files[1]["clocks"]["offset_ns"] == 700
    # The run's clock is that of a host without ranks: a shows 5 less than it. 200 on b is 1,900 of wall clock, which
    # is 900 of the run's and 895 on a.
    known = HostFile(name="a.pftrace", host="a", offset_ns=5, to_wall_ns=1_000)
    files = describe_hosts("run", [known, lost])["perfetto_manifest"]["files"]
    assert files[1]["clocks"]["offset_ns"] == 895 - 200
