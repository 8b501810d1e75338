"""Where the calls of two ranks diverge: in which function, and by which of its callers."""

from dataclasses import replace

import pytest

from dtprof.diagnosis.divergence.call_divergence import RankCall, align_frames, frames_of, part_sites
from dtprof.diagnosis.job_state import Stack
from dtprof.records.sites import Site
from dtprof.records.tables import CrashStack, ExceptionRecord
from tests.builders import RankBuilder
from tests.diagnosis.judging import CONNECTION_LOST, STEP, build_job

FILE = "/home/me/train.py"


def test_a_traceback_that_begins_further_in_is_the_same_place() -> None:
    """Rank 1 left a loop, and gloo aborted it: its stack begins with the launcher, the traceback of others later."""
    ranks = [RankBuilder(rank, 3, closed=False) for rank in range(3)]
    for rank in ranks:
        rank.op("all_reduce", 0, 9, site=rank.site("all_reduce", line=10), nbytes=64)
        line = 20 if rank.rank == 1 else 10
        rank.op("all_reduce", STEP, site=rank.site("all_reduce", line=line), nbytes=8 if line == 20 else 64)
    job = build_job(ranks, exit_status=1, statuses={0: (1, 2 * STEP), 1: (-6, 2 * STEP), 2: (1, 2 * STEP)})
    text = "Traceback (most recent call last):\n" + "".join(
        f'  File "{FILE}", line {line}, in {name}\n    x\n' for name, line in (("launch", 90), ("main", 10))
    )
    raised = ExceptionRecord(t_ns=2, type="RuntimeError", message=CONNECTION_LOST, traceback=text, frame=None)
    lines = (("main", 20), ("launch", 90), ("top", 99))
    stack = tuple(Site(file=FILE, line=line, function=name) for name, line in lines)
    died = replace(job.ranks[1], crash=CrashStack(signal=6, t_ns=2, thread="main", frames=stack))
    left = replace(job.ranks[0], exceptions=(raised,))
    a, b, common = align_frames(RankCall(left, left.operations[-1]), RankCall(died, died.operations[-1]))
    assert common is not None
    assert (a[common].line, b[common].line) == (10, 20)


@pytest.mark.parametrize(("function", "lines"), [("hop", [10, 25]), ("wait_all", [10])])
def test_a_call_that_is_waited_for_at_another_line_of_its_function_has_the_callers_of_that(
    function: str, lines: list[int]
) -> None:
    rank = RankBuilder(0, 2, closed=False)
    rank.op("all_reduce", 100, site=rank.site("all_reduce", line=10, function="hop"), nbytes=8)
    frames = tuple(
        Site(file="/home/me/train.py", line=line, function=name) for line, name in ((12, function), (25, "main"))
    )
    stacks = {0: Stack(state="S", cpu_share=None, frames=frames)}
    state = build_job([rank, RankBuilder(1, 2)], exit_status=None, stacks=stacks).ranks[0]
    assert [frame.line for frame in frames_of(state, state.operations[-1])] == lines


@pytest.mark.parametrize(
    ("mine", "theirs", "lines"),
    [
        ((("log", 20), ("main", 50)), (("log", 30), ("main", 50)), (20, 30)),
        ((("log", 20), ("main", 50)), (("log", 20), ("main", 60)), (50, 60)),
        ((("log", 20), ("main", 50)), (("check", 30), ("main", 50)), (20, 30)),  # one line calls either
        ((("log", 20), ("main", 50), ("top", 9)), (("log", 30), ("main", 50)), (20, 30)),  # more is known of one
        ((("log", 20), ("main", 50)), (), (7, 7)),
    ],
)
def test_calls_of_one_line_part_at_the_outermost_callers_that_differ(
    mine: tuple[tuple[str, int], ...], theirs: tuple[tuple[str, int], ...], lines: tuple[int, int]
) -> None:
    rank = RankBuilder(0, 2)
    a, b = (rank.sites[rank.site(line=7, function="average", callers=callers)] for callers in (mine, theirs))
    job = build_job([rank], exit_status=0, stalled=False)
    assert tuple(site.line for site in part_sites(job, a, b)) == lines
