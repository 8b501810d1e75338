"""Runs that went well although a rank made a collective in an exception handler: told where the source shows it."""

import os
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from dtprof.diagnosis.findings import Verdict
from dtprof.diagnosis.job_state import Handler, JobState
from dtprof.diagnosis.verdict import decide
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import WALL_CLOCK_NS, RankBuilder, write_run
from tests.diagnosis.judging import build_job, found_by

SOURCE = dedent("""\
    import torch
    import torch.distributed as dist

    def train(loader, model, seen, bad):
        for batch in loader:
            try:
                model(batch)
                dist.all_reduce(seen)
            except {caught}:{comment}
                dist.all_reduce(bad)
        try:
            model(batch)
        finally:
            dist.barrier()
    """)
USUAL, HANDLED, LAST = 8, 10, 14


def diagnosed(
    folder: Path,
    lines: dict[int, list[int]],
    *,
    caught: str = "RuntimeError",
    comment: str = "",
    changed: bool = False,
    api: str = "all_reduce",
) -> Verdict:
    """Diagnose ranks that made an all_reduce at each of these lines, and a barrier in the finally block."""
    source = folder / "train.py"
    source.write_text(SOURCE.format(caught=caught, comment=comment))
    written_ns = WALL_CLOCK_NS + (1 if changed else -1) * 10**9
    os.utime(source, ns=(written_ns, written_ns))
    ranks = [RankBuilder(rank, len(lines)) for rank in lines]
    for rank in ranks:
        for i, line in enumerate(lines[rank.rank]):
            site = rank.site(api, file=str(source), line=line, function="train")
            rank.op("all_reduce", 10 * i, 10 * i + 5, site=site, nbytes=8)
        site = rank.site("barrier", file=str(source), line=LAST, function="train")
        rank.op("barrier", 1000, 1005, site=site)
    return diagnose_run(write_run(folder / "run", ranks))


def at_lines(lines: dict[int, list[int]]) -> JobState:
    """Return a job that went well, whose ranks made an all_reduce at each of these lines."""
    ranks = [RankBuilder(rank, len(lines)) for rank in lines]
    for rank in ranks:
        for i, line in enumerate(lines[rank.rank]):
            site = rank.site("all_reduce", line=line, function="train")
            rank.op("all_reduce", 10 * i, 10 * i + 5, site=site, nbytes=8)
    handler = Handler(text="except RuntimeError", line=HANDLED - 1, call="dist.all_reduce(bad)")
    return build_job(ranks, exit_status=0, stalled=False, find_handlers=lambda _: {HANDLED: handler})


def one_in_a_handler() -> JobState:
    return at_lines(MET)


def all_in_the_handler() -> JobState:
    return at_lines({rank: [USUAL, HANDLED] for rank in range(3)})


FAULTY = {"collective-in-except": one_in_a_handler}
SOUND = all_in_the_handler
MET = {0: [USUAL] * 4, 1: [USUAL, USUAL, HANDLED, USUAL], 2: [USUAL] * 4}


def test_a_call_in_a_handler_that_met_others_is_noted_with_its_line_and_the_handler(tmp_path: Path) -> None:
    verdict = diagnosed(tmp_path, MET)
    assert (verdict.outcome, verdict.faults) == ("healthy", ())
    (note,) = verdict.findings
    assert (note.kind, note.severity, note.culprit_ranks, note.seq) == ("collective-in-except", "info", (1,), 2)
    assert note.culprit_call_sites[1].line == HANDLED
    assert {site.line for site in note.call_sites.values()} == {USUAL}
    assert "`except RuntimeError` (line 9)" in note.summary


def test_each_handler_is_noted_once_also_of_the_rank_that_others_are_compared_with(tmp_path: Path) -> None:
    (note,) = diagnosed(tmp_path, {0: [HANDLED, USUAL, HANDLED, USUAL], 1: [USUAL] * 4, 2: [USUAL] * 4}).findings
    assert (note.culprit_ranks, note.seq) == ((0,), 0)


@pytest.mark.parametrize(
    "how",
    [
        {"lines": {0: [USUAL, HANDLED], 1: [USUAL, HANDLED]}},  # all came to the handler
        {"lines": {0: [USUAL] * 3, 1: [USUAL] * 3}},
        {"caught": "StopIteration"},  # ends a loop in order
        {"comment": "  # dtprof: ignore the flag of the other line"},
        {"changed": True},  # since the job
        {"api": "all_gather"},  # not what the line calls now
    ],
)
def test_nothing_is_noted_where_all_handled_it_or_the_source_does_not_tell(
    how: dict[str, object], tmp_path: Path
) -> None:
    assert diagnosed(tmp_path, **({"lines": MET} | how)).findings == ()  # type: ignore[arg-type]


def test_source_that_is_gone_or_broken_does_no_harm(tmp_path: Path) -> None:
    diagnosed(tmp_path, MET)
    source = tmp_path / "train.py"
    source.write_text("def train(:\n" * 20)
    os.utime(source, ns=(0, 0))
    assert diagnose_run(tmp_path / "run").outcome == "healthy"
    source.unlink()
    assert diagnose_run(tmp_path / "run").findings == ()


def held_back(*, severity_of: str, **job: Any) -> JobState:
    """Return a job in which rank 1 comes to a finally block, or a handler, one call before the others."""
    ranks = [RankBuilder(rank, 3) for rank in range(3)]
    for rank in ranks:
        for i in range(3):
            line = HANDLED if rank.rank == 1 and i == 2 else USUAL
            rank.op("all_reduce", 10 * i, 10 * i + 5, site=rank.site("all_reduce", line=line), nbytes=8)
    is_finally = severity_of == "finally"
    handler = Handler(text=severity_of, line=HANDLED - 1, call="dist.all_reduce(bad)", is_finally=is_finally)
    return build_job(ranks, find_handlers=lambda _: {HANDLED: handler}, **job)


def test_a_finally_block_that_one_rank_came_to_first_is_a_warning() -> None:
    (finding,) = found_by("collective_in_except", held_back(severity_of="finally", exit_status=0, stalled=False))[:1]
    assert (finding.kind, finding.severity, finding.culprit_ranks) == ("collective-in-except", "warning", (1,))
    assert "in a `finally` block (line 9)" in finding.summary


def test_a_handler_beside_a_crash_is_a_warning() -> None:
    ranks = [RankBuilder(rank, 2, closed=False) for rank in range(2)]
    for rank in ranks:
        line = HANDLED if rank.rank else USUAL
        rank.op("all_reduce", 10, 15, site=rank.site("all_reduce", line=line), nbytes=8)
    ranks[1].exception(30, "ValueError", "no label", line=7)
    handler = Handler(text="except ValueError", line=9, call="dist.all_reduce(bad)")
    job = build_job(ranks, statuses={1: (1, 40), 0: (-15, 90)}, find_handlers=lambda _: {HANDLED: handler})
    kinds = [(finding.kind, finding.severity) for finding in decide(job).findings]
    assert kinds == [("rank-crashed", "error"), ("collective-in-except", "warning")]


def test_a_mismatch_says_in_which_handler_its_culprit_made_the_call() -> None:
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        rank.op("all_reduce", 10, 15, site=rank.site("all_reduce", line=USUAL), nbytes=8)
        odd = rank.rank == 1
        site = rank.site("barrier" if odd else "all_reduce", line=HANDLED if odd else USUAL)
        rank.op("barrier" if odd else "all_reduce", 20, site=site, nbytes=0 if odd else 8)
    handler = Handler(text="except ValueError", line=9, call="dist.barrier()")
    (finding,) = decide(build_job(ranks, find_handlers=lambda _: {HANDLED: handler})).findings
    assert finding.kind == "collective-order-mismatch"
    assert finding.evidence[-1].startswith("rank 1 made this call in `except ValueError` (line 9)")
