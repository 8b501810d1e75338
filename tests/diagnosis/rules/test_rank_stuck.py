"""Others wait for a rank that no operation holds up."""

from dataclasses import replace
from typing import Any

import pytest

from dtprof.diagnosis.absent_ranks import progress_of
from dtprof.diagnosis.job_state import JobState, Stack, main_stack
from dtprof.diagnosis.stack_groups import Frame, PythonState, RankStack, Thread
from dtprof.diagnosis.verdict import decide
from dtprof.records import events
from dtprof.records.schema import FLAG
from dtprof.records.sites import Site
from dtprof.records.tables import ThreadException
from tests.builders import START_NS
from tests.diagnosis.judging import build_job, found_by, gradients, judge, message, pair, ranks_in_step


def idle_in(state: str, phase: str | None = None, *, awaited: bool = True) -> JobState:
    ranks = ranks_in_step(3, 3)
    if phase is not None:
        ranks[0].span(phase, 3100)
    for rank in ranks[1:]:
        gradients(rank, 3000, done=not awaited)
    stack = Stack(state=state, cpu_share=0.0, frames=(), reason="no frames")
    return build_job(ranks, exit_status=None, stacks={0: stack})


def one_that_sleeps() -> JobState:
    return idle_in("sleeping")


def one_that_is_stopped() -> JobState:
    return idle_in("stopped")


def one_that_writes_a_checkpoint() -> JobState:
    return idle_in("running", events.CHECKPOINT)


def one_that_sleeps_and_nobody_waits() -> JobState:
    return idle_in("sleeping", awaited=False)


def one_whose_program_has_ended() -> JobState:
    job = idle_in("sleeping")
    waits = Site(file="/usr/lib/python3.11/threading.py", line=1590, function="_shutdown")
    left = replace(job.ranks[0], stack=Stack(state="sleeping", cpu_share=0.0, frames=(waits,)))
    return replace(job, ranks=job.ranks | {0: left})


def two_that_join_anew() -> JobState:
    """Return a job in which a group is made again, as under torchrun, whose store keeps what the first wrote."""
    ranks = ranks_in_step(3, 3)
    for rank in ranks[1:]:
        rank.span(events.INIT, 3000)
    gradients(ranks[0], 3100, done=False)
    return build_job(ranks, exit_status=1)


FAULTY = {
    "rank-never-joined": two_that_join_anew,
    "rank-stuck": one_that_sleeps,
    "rank-exited": one_whose_program_has_ended,
    "rank-frozen": one_that_is_stopped,
    "long-operation": one_that_writes_a_checkpoint,
}
SOUND = one_that_sleeps_and_nobody_waits


def test_the_exception_that_ended_a_thread_of_a_stuck_rank_is_named() -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks[1:]:
        gradients(rank, 3000, done=False)
    ranks[0].thread_exceptions.append(
        ThreadException(
            t_ns=START_NS + 2900,
            type="ValueError",
            message="corrupt shard 18\nin detail",
            traceback="",
            frame=Site(file="/home/me/train.py", line=55, function="work"),
            thread="Thread-1 (work)",
        )
    )
    stack = Stack(state="sleeping", cpu_share=0.0, frames=(Site(file="/home/me/train.py", line=60, function="main"),))
    finding = decide(build_job(ranks, exit_status=None, stacks={0: stack})).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-stuck", (0,))
    assert "(main), after its thread raised ValueError at /home/me/train.py:55 (work); ranks 1, 2" in finding.summary
    assert "rank 0: thread Thread-1 (work) ended by ValueError: corrupt shard 18 at /home/me/train.py:55 (work)" in (
        finding.evidence
    )
    assert "pass its exception on" in finding.advice[-1]


def test_a_program_that_has_ended_is_named_with_its_last_line_and_not_with_that_of_the_interpreter() -> None:
    job = one_whose_program_has_ended()
    finding = found_by("rank_stuck", job)[0]
    assert "has ended its program" in finding.summary
    assert finding.culprit_call_sites == {0: job.ranks[0].last_site}


def test_a_rank_that_is_only_late_is_not_said_to_have_skipped() -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks[:2]:
        gradients(rank, 3000, done=False)
    asleep = Stack(state="sleeping", cpu_share=0.0, frames=(Site(file="/home/me/train.py", line=77, function="load"),))
    finding = found_by("rank_stuck", build_job(ranks, exit_status=None, stacks={2: asleep}))[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-stuck", (2,))
    assert finding.culprit_call_sites[2].line == 77


def test_a_stopped_process_is_frozen() -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks[1:]:
        gradients(rank, 3000, done=False)
    stopped = Stack(state="stopped", cpu_share=0.0, frames=(), reason="the process is stopped")
    finding = found_by("rank_stuck", build_job(ranks, exit_status=None, stacks={0: stopped}))[0]
    assert (finding.kind, finding.culprit_ranks) == ("rank-frozen", (0,))


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        (("stopped", "running"), [("rank-frozen", (0,)), ("rank-stuck", (1,))]),
        (("sleeping", "stopped"), [("rank-stuck", (0,)), ("rank-frozen", (1,))]),
        (("stopped", "stopped"), [("rank-frozen", (0, 1))]),
    ],
)
def test_ranks_that_do_not_come_for_different_reasons_are_findings_of_their_own(
    states: tuple[str, str], expected: list[tuple[str, tuple[int, ...]]]
) -> None:
    ranks = ranks_in_step(4, 3)
    for rank in ranks[2:]:
        gradients(rank, 3000, done=False)
    stacks = {i: Stack(state=state, cpu_share=0.0, frames=(), reason="no frames") for i, state in enumerate(states)}
    verdict = decide(build_job(ranks, exit_status=None, stacks=stacks))
    assert [(finding.kind, finding.culprit_ranks) for finding in verdict.findings] == expected
    assert {finding.waiting_ranks for finding in verdict.findings} == {(2, 3)}


@pytest.mark.parametrize("phase", ["checkpoint", "compile"])
def test_a_long_checkpoint_or_compilation_is_a_warning_and_not_a_hang(phase: str) -> None:
    ranks = ranks_in_step(2, 3)
    ranks[0].span(phase, 3100)
    gradients(ranks[1], 3000, done=False)
    verdict = judge(ranks, exit_status=None)
    assert (verdict.outcome, verdict.findings[0].kind) == ("slow", "long-operation")
    assert verdict.findings[0].severity == "warning"


@pytest.mark.parametrize(
    ("state", "kind"), [("running", "long-operation"), ("sleeping", "rank-stuck"), ("stopped", "rank-frozen")]
)
def test_a_long_evaluation_is_one_where_the_rank_works(state: str, kind: str) -> None:
    ranks = ranks_in_step(2, 3)
    ranks[0].span("evaluation", 3100)
    gradients(ranks[1], 3000, done=False)
    stack = Stack(state=state, cpu_share=0.0, frames=(), reason="no frames")
    finding = found_by("rank_stuck", build_job(ranks, exit_status=None, stacks={0: stack}))[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (0,))


@pytest.mark.parametrize(
    ("steps", "state", "phase", "early"),
    [
        (0, "running", "forward", True),
        (0, "running", None, False),
        (0, "sleeping", "forward", False),
        (2, "running", "forward", False),
    ],
)
def test_a_rank_that_works_in_its_first_step_is_marked(steps: int, state: str, phase: str | None, early: bool) -> None:
    ranks = ranks_in_step(2, steps)
    if phase is not None:
        ranks[0].span(phase, 1000 * steps + 100)
    gradients(ranks[1], 1000 * steps + 50, done=False)
    stack = Stack(state=state, cpu_share=0.0, frames=(), reason="no frames")
    finding = found_by("rank_stuck", build_job(ranks, exit_status=None, stacks={0: stack}))[0]
    assert (finding.kind, finding.is_early) == ("rank-stuck", early)


def test_a_chain_of_messages_that_one_late_rank_begins_is_no_cycle() -> None:
    ranks = pair(3)
    message(ranks[1], "recv", 0, 100, line=8)
    message(ranks[2], "recv", 1, 100, line=8)
    finding = found_by("rank_stuck", build_job(ranks, exit_status=None))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-stuck", (0,), (1, 2))


@pytest.mark.parametrize(
    ("state", "facts", "kind"),
    [
        ("running", {"python_state": PythonState.CHANGED}, "long-operation"),
        ("running", {"python_state": PythonState.NATIVE}, "long-operation"),
        ("running", {"python_state": PythonState.UNCHANGED}, "rank-stuck"),  # a loop that asks for something
        ("running", {"python_state": PythonState.UNCHANGED, "page_faults": 900}, "long-operation"),
        ("running", {"python_state": PythonState.ENDLESS}, "rank-stuck"),  # what it counts leads nowhere
        ("sleeping", {"io_bytes": 50_000_000}, "long-operation"),
        ("disk-sleep", {"io_bytes": 50_000_000}, "long-operation"),
        ("disk-sleep", {"io_bytes": 0}, "rank-frozen"),
        ("sleeping", {"children_cpu_share": 0.9}, "long-operation"),  # a compiler, workers of a loader
        ("sleeping", {"children_cpu_share": 0.0, "io_bytes": 12, "page_faults": 3}, "rank-stuck"),
        ("stopped", {"children_cpu_share": 0.9}, "rank-frozen"),
    ],
)
def test_a_rank_that_gets_on_with_something_is_at_a_long_operation(
    state: str, facts: dict[str, Any], kind: str
) -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks[1:]:
        gradients(rank, 3000, done=False)
    stack = Stack(state=state, cpu_share=0.9 * (state == "running"), frames=(), reason="no frames", **facts)
    verdict = judge(ranks, exit_status=None, stacks={0: stack})
    assert (verdict.findings[0].kind, verdict.findings[0].culprit_ranks) == (kind, (0,))
    assert verdict.outcome == ("slow" if kind == "long-operation" else "hang")


@pytest.mark.parametrize(("cpu_share", "kind"), [(0.98, "long-operation"), (0.0, "rank-stuck")])
def test_a_rank_that_computes_is_at_work_where_no_stack_could_be_taken(cpu_share: float, kind: str) -> None:
    ranks = ranks_in_step(3, 3)
    for rank in ranks[1:]:
        gradients(rank, 3000, done=False)
    stack = Stack(state="running", cpu_share=cpu_share, frames=(), reason="py-spy is not installed")
    (finding,) = judge(ranks, exit_status=None, stacks={0: stack}).findings
    assert (finding.kind, finding.culprit_ranks) == (kind, (0,))
    if kind == "long-operation":
        assert finding.confidence == 0.5
        assert "no stack shows" in finding.evidence[0]


def test_a_host_that_spins_in_a_driver_for_its_device_gets_on_with_nothing() -> None:
    ranks = ranks_in_step(3, 3)
    ranks[0].op("all_reduce", 2900, is_async=True, flags=FLAG["device"])
    for rank in ranks[1:]:
        gradients(rank, 3000, done=False)
    stack = Stack(state="running", cpu_share=1.0, frames=(), reason="", python_state=PythonState.NATIVE)
    job = build_job(ranks, exit_status=None, stacks={0: stack})
    rank = replace(job.ranks[0], open_operations=(replace(job.ranks[0].operations[-1], on_device=True),))
    assert not progress_of(rank)
    assert progress_of(job.ranks[1]) == ()
    assert progress_of(job.ranks[0]) == ("it computes in native code",)


@pytest.mark.parametrize(("in_library", "line"), [(True, 77), (False, None)])
def test_a_rank_in_a_library_does_not_wait_for_an_unwaited_send(in_library: bool, line: int | None) -> None:
    ranks = ranks_in_step(3, 3)
    ranks[2].op("send", 2900, returned=2901, peer=0, site=ranks[2].site("isend", line=30), nbytes=8)
    ranks[0].op("recv", 2900, 2950, peer=2, site=ranks[0].site("recv", line=31), nbytes=8)
    for rank in ranks[:2]:
        gradients(rank, 3000, done=False)
    frames = (Site(file="/home/me/train.py", line=77, function="load"),)
    asleep = Stack(state="sleeping", cpu_share=0.0, frames=frames, in_library=in_library)
    found = found_by("rank_stuck", build_job(ranks, exit_status=None, stacks={2: asleep}))
    assert [finding.culprit_call_sites[2].line for finding in found if finding.culprit_ranks == (2,)] == (
        [line] if line is not None else []
    )


@pytest.mark.parametrize(("last_s", "kind"), [(7.5, "long-operation"), (3, "rank-stuck")])
def test_a_rank_without_a_stack_that_records_to_the_end_is_at_work(last_s: float, kind: str) -> None:
    """The others wait from second 1 on, and lose their patience in second 8."""
    second = 1_000_000_000
    ranks = ranks_in_step(3, 3)
    for rank in ranks[1:]:
        rank.op("barrier", second, 8 * second, state="failed", site=rank.site("barrier", line=9))
        rank.exception(8 * second, "RuntimeError", "Timed out waiting 7000ms for recv operation to complete")
    for number in range(int(last_s * 2)):
        ranks[0].span(events.DATA, number * second // 2 + 4000, number * second // 2 + 4100)
    finding = found_by("rank_stuck", build_job(ranks, exit_status=1))[0]
    assert (finding.kind, finding.culprit_ranks) == (kind, (0,))


def test_ranks_that_join_anew_while_another_is_through_have_not_come_out_of_it() -> None:
    finding = found_by("rank_stuck", two_that_join_anew())[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-never-joined", (1, 2), (0,))
    assert finding.summary.startswith("Ranks 1, 2 have not come out of init_process_group")
    assert finding.advice[0].startswith("It has joined before: ")


@pytest.mark.parametrize(
    ("frames", "called", "advice"),
    [
        (
            [
                ("/usr/lib/python3.11/threading.py", "Condition.wait"),
                ("/usr/lib/python3.11/queue.py", "Queue.get"),
            ],
            "Queue.get (queue.py)",
            "It waits for a queue",
        ),
        (
            [
                ("/venv/lib/python3.11/site-packages/torch/distributed/rpc/api.py", "rpc_sync"),
                ("/venv/lib/python3.11/site-packages/torch/distributed/rpc/api.py", "_require.<locals>.wrapper"),
                ("/src/dtprof/capture/frameworks/attribution.py", "Attribution.wrapped.<locals>.wrapped"),
            ],
            "rpc_sync (torch/distributed/rpc/api.py)",
            "It waits for the answer of an RPC",
        ),
        ([], "", "Look at the line it is at"),
    ],
)
def test_what_a_stuck_rank_calls_of_a_library_is_evidence_and_decides_the_advice(
    frames: list[tuple[str, str]], called: str, advice: str
) -> None:
    own = Frame(file="/home/me/train.py", line=21, function="train")
    threads = [Thread(name="MainThread", frames=(*(Frame(file=f, line=9, function=name) for f, name in frames), own))]
    stack = main_stack(RankStack(rank=0, pid=1, state="sleeping", cpu_share=0.0, threads=tuple(threads)))
    assert stack.library_call == called
    job = idle_in("sleeping")
    (finding,) = found_by("rank_stuck", replace(job, ranks=job.ranks | {0: replace(job.ranks[0], stack=stack)}))
    assert finding.advice[0].startswith(advice)
    assert f"stack: {f'{called} < ' if called else ''}train (/home/me/train.py:21)" in finding.evidence[0]
