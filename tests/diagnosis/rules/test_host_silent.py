"""Hosts of a job of several that are heard of no more."""

import os
from dataclasses import replace
from pathlib import Path

from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.sources import recorded_run
from dtprof.diagnosis.verdict import decide
from dtprof.records import paths
from dtprof.records.nodes.node_reader import last_heard_s
from dtprof.records.tables import ProcessExit
from tests.builders import START_NS
from tests.diagnosis.judging import build_job, found_by, gradients, loss, ranks_in_step


def cut_off(*silent: str, stalled: bool = True) -> JobState:
    """Return a job of rank 0 on host a, rank 1 on b, rank 2 on c; those on silent hosts may be anywhere."""
    ranks = ranks_in_step(3, 3)
    for rank, name in zip(ranks, "abc", strict=True):
        rank.host = f"host-{name}"
        if rank.host not in silent:
            gradients(rank, 3000, done=False)
    job = build_job(ranks, exit_status=None, stalled=stalled)
    return replace(job, silent_s=dict.fromkeys(silent, 21.4))


def cut_off_in_the_same_operation() -> JobState:
    """Return a job whose silent rank had issued the operation: its records do not say that it is missing."""
    job = cut_off("host-b")
    return replace(job, ranks={**job.ranks, 1: replace(cut_off().ranks[1], host="host-b")})


FAULTY = {"host-silent": lambda: cut_off("host-b")}


def SOUND() -> JobState:  # noqa: N802 - the name that every file of rules has
    """Return a job of which nobody waits for the silent host."""
    return cut_off("host-b", stalled=False)


def test_the_silent_host_its_ranks_and_who_waits_are_named() -> None:
    verdict = decide(cut_off("host-b"))
    assert verdict.outcome == "hang"
    finding = verdict.findings[0]
    assert finding.kind == "host-silent"
    assert finding.summary == (
        "Host host-b (rank 1) has not been heard of for 21 s; ranks 0, 2 wait in all_reduce #6 of the default group."
    )
    assert (finding.culprit_ranks, finding.waiting_ranks, finding.culprit_hosts) == ((1,), (0, 2), ("host-b",))
    assert finding.confidence == 0.85
    assert "whether host-b stopped, or only the network to it" in verdict.cannot_tell[0]


def test_the_last_record_of_a_silent_rank_does_not_make_it_a_rank_that_skipped() -> None:
    finding = decide(cut_off_in_the_same_operation()).findings[0]
    assert (finding.kind, finding.culprit_ranks) == ("host-silent", (1,))


def test_where_most_hosts_are_silent_it_may_be_the_other_one() -> None:
    finding = found_by("host_silent", cut_off("host-b", "host-c"))[0]
    assert finding.confidence == 0.5
    assert finding.summary.startswith("Hosts host-b, host-c (ranks 1, 2)")


def test_findings_name_the_hosts_of_culprits_in_jobs_of_several_hosts_only() -> None:
    ranks = ranks_in_step(2, 3)
    loss(ranks[0], 3000, done=False)
    gradients(ranks[1], 3000, done=False)
    job = build_job(ranks)
    assert decide(job).findings[0].culprit_hosts == ()
    split = replace(job, ranks={rank: replace(state, host=f"host-{rank}") for rank, state in job.ranks.items()})
    finding = decide(split).findings[0]
    assert finding.culprit_hosts == tuple(f"host-{rank}" for rank in finding.culprit_ranks)


def test_a_host_is_silent_by_when_its_samples_came_beside_those_of_others(tmp_path: Path) -> None:
    class Run:
        path = tmp_path

    for host, written_s in (("host-a", 1000.0), ("host-b", 985.0), ("host-c", 991.0)):
        file = tmp_path / paths.node_folder_name(host) / "samples.jsonl"
        file.parent.mkdir()
        file.write_text("{}\n")
        os.utime(file, (written_s, written_s))
    assert last_heard_s(tmp_path) == {"host-a": 1000.0, "host-b": 985.0, "host-c": 991.0}
    ranks = list(cut_off().ranks.values())
    assert recorded_run._find_silent(Run, ranks) == {"host-b": 15.0}  # type: ignore[arg-type]
    # One of one host, or whose program has ended, is no news.
    assert recorded_run._find_silent(Run, ranks[1:2]) == {}  # type: ignore[arg-type]
    end = ProcessExit(pid=ranks[1].pid, status=0, t_ns=START_NS)
    done = [replace(rank, exit=end if rank.rank == 1 else None) for rank in ranks]
    assert recorded_run._find_silent(Run, done) == {}  # type: ignore[arg-type]
