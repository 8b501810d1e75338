"""Runs that went well although a rank made a collective in an exception handler: told where the source shows it."""

import os
from pathlib import Path
from textwrap import dedent

import pytest

from dtprof.diagnosis.findings import Verdict
from dtprof.diagnosis.job_state import Handler, JobState
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import WALL_CLOCK_NS, RankBuilder, write_run
from tests.diagnosis.judging import build_job

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
