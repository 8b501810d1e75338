"""Chrome's trace events, read as its viewers read them."""

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from dtprof.analysis.results import Summary
from dtprof.analysis.timeline.operation_detail import RunDetail, read_detail
from dtprof.errors import NothingToShowError
from dtprof.interchange.exporters.chrome_trace import write_chrome
from tests.builders import MemoryRun, RankBuilder
from tests.interchange.reading_traces import Slice, assert_figures_equal, assert_no_overlap


def read(path: Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        document: dict[str, Any] = json.load(file)
    return document


def slices_of(document: dict[str, Any]) -> tuple[list[Slice], list[object]]:
    """Return the slices and the lane of each, times in ns."""
    events = document["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    drawn = [event for event in events if event["ph"] == "X"]
    slices = [
        Slice(
            rank=event["pid"],
            track=names[event["pid"], event["tid"]],
            name=event["name"],
            begin_ns=round(event["ts"] * 1000),
            end_ns=round(event["ts"] * 1000) + round(event["dur"] * 1000),
            arguments=event["args"],
        )
        for event in drawn
    ]
    return slices, [(event["pid"], event["tid"]) for event in drawn]


@pytest.fixture(scope="module")
def document(detail: RunDetail, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("chrome") / "run.json.gz"
    assert write_chrome(detail, path) == []
    return read(path)


def test_figures_are_those_of_the_summary(document: dict[str, Any], summary: Summary, used: range) -> None:
    slices, lanes = slices_of(document)
    assert_figures_equal(slices, summary, used)
    assert_no_overlap(slices, lanes)


def test_flows_begin_with_the_first_end_once_and_go_forward_in_time(document: dict[str, Any]) -> None:
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in document["traceEvents"]:
        if event["ph"] in "stf":
            flows[event["id"]].append(event)
    assert len(flows) > 100
    for events in flows.values():
        events.sort(key=lambda event: (event["ts"], "stf".index(event["ph"])))
        phases = "".join(event["ph"] for event in events)
        assert re.fullmatch("s+t*f", phases)  # several come first where they come in the same ns


def test_names_that_are_json_or_templates_arrive_as_they_are(out: Path) -> None:
    rank = RankBuilder(0, world_size=1)
    rank.group("1", [0], 'a "quoted" 100%s group\n')
    rank.span("phase:50%d\\", 1, 2)
    rank.op("all_reduce", 10, 20, group=1, api="%s")
    write_chrome(read_detail(MemoryRun([rank])), out)
    events = read(out)["traceEvents"]
    (operation,) = [event for event in events if event["name"] == "all_reduce"]
    assert operation["args"]["group"] == '1 (a "quoted" 100%s group\n)'
    assert operation["dur"] == 0.01


def test_steps_that_are_not_there_are_refused(detail: RunDetail, out: Path) -> None:
    with pytest.raises(NothingToShowError, match="its steps are 2 to 6"):
        write_chrome(detail, out, steps=(7, 9))


def test_only_the_steps_asked_for_are_drawn(detail: RunDetail, out: Path) -> None:
    write_chrome(detail, out, steps=(3, 4))
    slices, _ = slices_of(read(out))
    windows = {s.arguments["step"]: s for s in slices if s.track == "steps" and s.rank == 0}
    first, last = windows[3].begin_ns, windows[4].end_ns
    drawn = [one for one in slices if one.rank == 0 and one.track != "steps"]
    assert drawn
    assert all(first <= one.begin_ns < last for one in drawn)
