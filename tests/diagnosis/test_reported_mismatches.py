"""Mismatches told of while the job ran are not lost where the diagnosis does not repeat them."""

from typing import Any

from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.diagnosis.reported_mismatches import list_reported
from dtprof.records.tables import Group

SECOND = 1_000_000_000
ROW: dict[str, Any] = {
    "realtime_ns": 12 * SECOND,
    "kind": "size-mismatch",
    "group": "0",
    "seq": 7,
    "summary": "sizes differ",
}


def verdict_on(kind: str) -> Verdict:
    group = Group(name="0", description="", size=2, ranks=(0, 1))
    finding = Finding(kind=kind, summary="x", culprit_ranks=(), grade=1.0, group=group, seq=7)
    return Verdict(outcome="hang", source=("run",), ranks_seen=(0, 1), ranks_missing=(), findings=(finding,))


def test_what_the_verdict_does_not_repeat_is_kept_once_with_its_time() -> None:
    (told,) = list_reported([ROW, ROW], None, started_ns=2 * SECOND)
    assert (told.kind, told.group, told.seq, told.summary, told.after_s) == (
        "size-mismatch",
        "0",
        7,
        "sizes differ",
        10,
    )
    assert len(list_reported([ROW], verdict_on("dtype-mismatch"), started_ns=None)) == 1


def test_what_the_verdict_says_is_not_said_twice() -> None:
    assert list_reported([ROW], verdict_on("size-mismatch"), started_ns=0) == ()


def test_a_group_that_is_created_again_is_another_one() -> None:
    again = ROW | {"instance": 1}
    (told,) = list_reported([ROW, again], verdict_on("size-mismatch"), started_ns=2 * SECOND)
    assert told.summary == "sizes differ"
    assert len(list_reported([ROW, again], None, started_ns=0)) == 2


def test_damaged_rows_are_passed_over() -> None:
    assert list_reported([{}, ROW | {"kind": 3}, ROW | {"summary": None}], None, started_ns=0) == ()
    (told,) = list_reported([ROW | {"realtime_ns": "x", "seq": None}], None, started_ns=0)
    assert (told.seq, told.after_s) == (0, None)
