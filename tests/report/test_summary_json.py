"""The summary as JSON and its command."""

import json
from pathlib import Path

import pytest

from dtprof.analysis.results import PARTS
from dtprof.cli.main import main
from dtprof.cli.summary import indented
from tests.builders import RankBuilder, write_run

MS = 1_000_000
SHAPE = {
    "schema": int,
    "world_size": int,
    "hosts": list,
    "backend": str,
    "torch": str,
    "complete": bool,
    "missing_ranks": list,
    "dropped_events": int,
    "clock_error_ns": int,
    "overhead": {"capture_ns_per_event": int, "capture_ns_total": int, "share_of_step": float},
    "groups": [{"name": str, "description": str, "ranks": list, "axis": str}],
    "steps": {"count": int, "used": list, "duration_ns": {"median": int, "p10": int, "p90": int}},
    "ranks": [
        {
            "rank": int,
            "step_ns": int,
            "partition_ns": dict.fromkeys(PARTS, int),
            "phases_ns": dict.fromkeys(("data", "forward", "backward", "optimizer", "checkpoint"), int),
            "memory": {"peak_bytes": int, "categories": dict},
        }
    ],
    "collectives": [
        {
            "group": str,
            "op": str,
            "api": str,
            "count": int,
            "bytes": int,
            "duration_ns": int,
            "wait_ns": int,
            "transfer_ns": int,
            "exposed_ns": int,
            "overlap": float,
            "busbw_gb_per_s": float,
        }
    ],
    "stragglers": [{"rank": int, "last_share": float, "slowdown": float, "blame_ns_per_step": int}],
    "cannot_tell": list,
}
"""Schema 1 of the contract: names and types; additions are allowed, changes are not."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    ranks = [RankBuilder(i, world_size=2) for i in range(2)]
    for rank in ranks:
        group = rank.group("1", (0, 1), "mesh_dp")
        for step in range(6):
            begin = step * 100 * MS
            rank.span("backward", begin + 10 * MS, begin + 80 * MS)
            late = 20 * MS * rank.rank
            rank.op(
                "all_reduce",
                begin + 50 * MS + late,
                begin + 80 * MS,
                is_async=True,
                nbytes=64,
                group=group,
                api="Tensor.backward",
            )
            rank.span("optimizer", begin + 80 * MS, begin + 90 * MS)
            rank.sample("peak_rss_bytes", begin + 91 * MS, 10_000)
    return write_run(tmp_path / "run", ranks)


def check(value: object, shape: object, path: str = "$") -> None:
    if isinstance(shape, dict):
        assert isinstance(value, dict), path
        for name, inner in shape.items():
            assert name in value, f"{path}.{name}"
            check(value[name], inner, f"{path}.{name}")
    elif isinstance(shape, list):
        assert isinstance(value, list), path
        assert value, path
        for item in value:
            check(item, shape[0], f"{path}[]")
    else:
        assert isinstance(shape, type)
        assert isinstance(value, shape), f"{path} is {value!r}"


def test_the_document_has_the_names_and_types_of_schema_1(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["groups"].pop(0)["axis"] is None  # the default group lies on no axis
    check(document, SHAPE)
    assert (document["schema"], document["pipeline"]) == (1, None)
    assert document["groups"][0]["axis"] == "dp"
    for rank in document["ranks"]:
        assert sum(rank["partition_ns"].values()) == rank["step_ns"]


def test_every_null_has_a_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["summary", str(run), "--json"])
    document = json.loads(capsys.readouterr().out)
    nulls = {name for name, value in document.items() if value is None}
    reasons = {reason.split(":")[0] for reason in document["cannot_tell"]}
    assert nulls == {"pipeline", "tokens_per_s", "samples_per_s"}
    assert nulls <= reasons


def test_the_text_goes_to_stdout_alone(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(run)]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("job         torchrun train.py")
    assert captured.err == ""


def test_a_path_without_a_run_is_refused_with_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "holds no run" in captured.err


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"a": [], "b": {"c": [1, -0.5, 1e-05, 1e22, 2**90, None, True]}},
        {"name": 'caf\u00e9 "x" \n\u2028'},
        ["\udcff"],
    ],
)
def test_indented_json_is_that_of_the_standard_library(document: object) -> None:
    assert indented(document) == json.dumps(document, indent=1)
