"""A signal ended one rank, and nobody sent it to the whole job."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest

from dtprof.diagnosis.job_state import JobState, MemoryUse
from dtprof.records.oom_victims import OomVictim
from dtprof.records.rank_log.crash_stacks import qualify_names, read_crash
from dtprof.records.sites import Site
from tests.diagnosis.judging import CONNECTION_LOST, build_job, found_by, gradients, judge, ranks_in_step


def killed(*culprits: int) -> JobState:
    ranks = ranks_in_step(3, 2)
    return build_job(ranks, statuses={rank: (-9 if rank in culprits else -15, 2500) for rank in range(3)})


def one_that_is_killed() -> JobState:
    return killed(2)


def all_that_are_stopped() -> JobState:
    return killed()


FAULTY = {"rank-killed": one_that_is_killed}
SOUND = all_that_are_stopped


def test_the_killed_rank_is_named_with_its_signal() -> None:
    ranks = ranks_in_step(4, 2)
    for victim in ranks[:3]:
        gradients(victim, 2000, done=False)
        victim.exception(2200, "RuntimeError", CONNECTION_LOST)
    statuses = {0: (1, 2600), 1: (-15, 2700), 2: (1, 2600), 3: (-signal.SIGKILL, 2500)}
    finding = found_by("rank_killed", build_job(ranks, statuses=statuses))[0]
    assert (finding.kind, finding.culprit_ranks, finding.waiting_ranks) == ("rank-killed", (3,), (0, 1, 2))
    assert "SIGKILL" in finding.summary


def test_the_oom_killer_is_named_where_the_cgroup_counted_it() -> None:
    ranks = ranks_in_step(2, 2)
    gradients(ranks[0], 2000, done=False)
    finding = found_by("rank_killed", build_job(ranks, statuses={0: (-15, 3000), 1: (-9, 2500)}, oom_kills=1))[0]
    assert any("OOM killer" in fact for fact in finding.evidence)


@pytest.mark.parametrize(
    ("resident", "said"),
    [
        ({0: 2**28, 1: 3 * 2**29, 2: 2**28, 3: 2**30}, ["1.50 GiB", "256 MiB"]),
        ({0: 2**28, 1: 2**30, 2: 2**29}, ["1.00 GiB", "256 MiB to 512 MiB"]),
        ({1: 2**30}, ["1.00 GiB"]),  # no other was sampled
        ({0: 2**30}, []),  # the rank itself was not
    ],
)
def test_what_a_rank_held_is_reported_beside_the_ranks_of_its_host(resident: dict[int, int], said: list[str]) -> None:
    ranks = ranks_in_step(4, 2)
    ranks[3].host = "elsewhere"
    for victim in (ranks[0], ranks[2], ranks[3]):
        gradients(victim, 2000, done=False)
    statuses = {rank: (-9 if rank == 1 else -15, 2500 + 10 * (rank != 1)) for rank in range(4)}
    finding = found_by("rank_killed", build_job(ranks, statuses=statuses, oom_kills=1, resident=resident))[0]
    assert finding.culprit_ranks == (1,)
    words = zip(("rank 1 held {} in RAM when last sampled", "the other ranks of its host {}"), said, strict=False)
    told = ", ".join(text.format(size) for text, size in words)
    assert [fact for fact in finding.evidence if "RAM" in fact] == ([told] if told else [])


LIMIT = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 2000ms for recv operation"
)


def preempted(
    statuses: dict[int, tuple[int, int]], *, exit_status: int = 1, message: str = CONNECTION_LOST
) -> tuple[str, tuple[int, ...]]:
    ranks = ranks_in_step(3, 2)
    for rank in ranks:
        gradients(rank, 2000, done=rank.rank == 2)
        if rank.rank != 2 and statuses[rank.rank][0] == 1:
            rank.exception(2500, message=message)
    verdict = judge(ranks, statuses=statuses, exit_status=exit_status)
    return (verdict.findings[0].kind, verdict.findings[0].culprit_ranks) if verdict.findings else (verdict.outcome, ())


def test_sigterm_of_one_rank_while_the_others_live_on_is_not_the_end_of_the_whole_job() -> None:
    second = 1_000_000_000
    assert preempted({2: (-15, 2400), 0: (1, 2600), 1: (1, 2700)}) == ("rank-killed", (2,))
    assert preempted({2: (-15, 2400), 0: (-15, 3 * second), 1: (-15, 3 * second)}) == ("rank-killed", (2,))
    assert preempted({2: (-15, 2400), 0: (-15, 2500), 1: (-15, 9000)})[0] != "rank-killed"
    assert preempted({2: (-15, 2400), 0: (1, 2600), 1: (1, 2700)}, exit_status=-15)[0] != "rank-killed"
    # A launcher ends the last one where the others failed before, here by a limit.
    assert preempted({2: (-15, 2900), 0: (1, 2600), 1: (1, 2700)})[0] != "rank-killed"
    assert preempted({2: (-15, 2400), 0: (1, 2600), 1: (1, 2700)}, message=LIMIT)[0] != "rank-killed"


CRASH = """signal 11 at 2400 in {} thread
Stack (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 519 in string_at
  File "/home/me/kernels.py", line 6 in launch
  File "/home/me/train.py", line 22 in <module>
"""


@pytest.mark.parametrize(("status", "line"), [(-11, 6), (-9, None)])
def test_the_line_is_that_at_which_the_signal_hit_which_ended_the_rank(
    tmp_path: Path, status: int, line: int | None
) -> None:
    # A signal that the process survived (a runtime that handles its own faults) says nothing of a later SIGKILL.
    (tmp_path / "crash.txt").write_text(CRASH.format("the main"))
    crash = read_crash(tmp_path / "crash.txt")
    ranks = ranks_in_step(2, 2)
    gradients(ranks[0], 2000, done=False)
    job = build_job(ranks, statuses={0: (-15, 3000), 1: (status, 2500)})
    job = replace(job, ranks=job.ranks | {1: replace(job.ranks[1], crash=crash)})
    finding = found_by("rank_killed", job)[0]
    assert [site.line for site in finding.culprit_call_sites.values()] == ([line] if line else [])
    assert ("launch (/home/me/kernels.py:6) < <module>" in finding.evidence[0]) == (line == 6)


def test_a_crashed_line_has_the_name_that_operations_from_it_were_recorded_with(tmp_path: Path) -> None:
    (tmp_path / "crash.txt").write_text(CRASH.format("the main"))
    crash = read_crash(tmp_path / "crash.txt")
    assert crash is not None
    recorded = [
        Site(file="/home/me/kernels.py", line=6, function="Kernels.launch"),
        Site(file="/home/me/train.py", line=22, function="Trainer.step"),  # another function of that line: a lambda
    ]
    named = qualify_names(crash, recorded)
    assert [frame.function for frame in named.frames] == ["string_at", "Kernels.launch", "<module>"]


@pytest.mark.parametrize("text", ["", "garbage", "signal x at 5 in the main thread\n"])
def test_what_is_no_stack_of_a_crash_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "crash.txt").write_text(text)
    assert read_crash(tmp_path / "crash.txt") is None
    assert read_crash(tmp_path / "missing.txt") is None


@pytest.mark.parametrize(
    ("of_rank", "name", "late_ns", "said"),
    [
        (True, "trainer", 9 * 10**9, True),  # its own number
        (False, "python3", 10**8, True),  # another number, at that time: the host counts otherwise than a container
        (False, "python3", 9 * 10**9, False),
        (False, "postgres", 10**8, False),
    ],
)
def test_the_oom_killer_outside_the_cgroup_is_named_by_the_kernels_log(
    of_rank: bool, name: str, late_ns: int, said: bool
) -> None:
    ranks = ranks_in_step(2, 2)
    gradients(ranks[0], 2000, done=False)
    statuses = {0: (-15, 3000), 1: (-9, 2500)}
    exit_seen = build_job(ranks, statuses=statuses).ranks[1].exit
    assert exit_seen is not None
    pid = exit_seen.pid if of_rank else 4_000_000
    victim = OomVictim(pid=pid, name=name, t_ns=exit_seen.t_ns + late_ns, resident_bytes=2**30)
    finding = found_by("rank_killed", build_job(ranks, statuses=statuses, oom_victims=(victim,)))[0]
    assert any("OOM killer" in fact for fact in finding.evidence) == said
    assert any("ran out of memory" in advice for advice in finding.advice) == said


@pytest.mark.parametrize(("share", "said"), [(0.97, True), (0.5, False)])
def test_memory_that_was_nearly_full_before_a_kill_is_evidence(share: float, said: bool) -> None:
    ranks = ranks_in_step(2, 2)
    gradients(ranks[0], 2000, done=False)
    use = MemoryUse(share=share)
    job = build_job(ranks, statuses={0: (-15, 3000), 1: (-9, 2500)}, find_memory_use=lambda: {1: use})
    assert any("97 % of the memory" in fact for fact in found_by("rank_killed", job)[0].evidence) == said


@pytest.mark.parametrize(
    ("use", "said"),
    [
        (MemoryUse(share=0.8, since_s=0.4, growth_per_s=0.5), "80 % of the memory"),
        (MemoryUse(share=0.8, since_s=0.1, growth_per_s=0.5), ""),
        (MemoryUse(share=0.8, since_s=9.0, growth_per_s=-0.5), ""),
    ],
)
def test_memory_that_grew_to_the_limit_between_samples_is_evidence(use: MemoryUse, said: str) -> None:
    ranks = ranks_in_step(2, 2)
    gradients(ranks[0], 2000, done=False)
    job = build_job(ranks, statuses={0: (-15, 3000), 1: (-9, 2500)}, find_memory_use=lambda: {1: use})
    evidence = [fact for fact in found_by("rank_killed", job)[0].evidence if "of the memory" in fact]
    assert [fact[:18] for fact in evidence] == ([said[:18]] if said else [])


def test_kills_that_only_the_counter_of_the_host_shows_are_evidence() -> None:
    ranks = ranks_in_step(2, 2)
    gradients(ranks[0], 2000, done=False)
    finding = found_by("rank_killed", build_job(ranks, statuses={0: (-15, 3000), 1: (-9, 2500)}, host_oom_kills=2))[0]
    assert any("2 times on the hosts" in fact for fact in finding.evidence)
    assert any("ran out of memory" in advice for advice in finding.advice)


def test_the_line_of_the_last_record_is_not_sold_as_the_line_of_the_end() -> None:
    ranks = ranks_in_step(2, 2)
    gradients(ranks[0], 2000, done=False)
    finding = found_by("rank_killed", build_job(ranks, statuses={0: (-15, 3000), 1: (-9, 2500)}))[0]
    assert finding.culprit_call_sites == {}
    assert "where it was is not known: its last record is at" in finding.evidence[0]
