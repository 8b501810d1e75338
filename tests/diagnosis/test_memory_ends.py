"""Batch systems, daemons and frameworks that end processes for want of memory, outside the job's own control group."""

import pytest

from dtprof.diagnosis.known_errors import HOST_MEMORY
from tests.diagnosis import log_texts as texts
from tests.diagnosis.log_texts import Diagnose

KILLS = {
    "slurm, memory limit": "slurmstepd: error: Step 77.0 exceeded memory limit (33987212 > 33554432), being killed",
    "slurm, job": "slurmstepd: error: Exceeded job memory limit at some point.",
    "lsf": "TERM_MEMLIMIT: job killed after reaching LSF memory usage limit.",
    "pbs": "=>> PBS: job killed: mem 34359738kb exceeded limit 33554432kb",
    "grid engine": 'job 4711 exceeds job hard limit "h_vmem" of queue "all.q@n1" (34.0G > limit:32.0G) - sending '
    "SIGKILL",
    "htcondor": "Error from slot1@n1: Job has gone over memory limit of 4096 megabytes. Peak usage: 4100 megabytes.",
    "kubernetes": "    Last State:     Terminated\n      Reason:       OOMKilled\n      Exit Code:    137",
    "systemd-oomd": "systemd-oomd[600]: Killed /user.slice/user-1000.slice/train.scope due to memory pressure for "
    "/user.slice being 81.15% > 50.00% for > 20s with reclaim activity",
    "earlyoom": 'sending SIGKILL to process 4001 uid 1000 "python3": badness 987, VmRSS 30211 MiB',
    "ray": "Task was killed due to the node running low on memory.",
    "kernel": "[ 812.124] Out of memory: Killed process 4001 (python3) total-vm:91234567kB, anon-rss:30211000kB",
}
NO_KILLS = {
    "slurm": "slurmstepd: error: Detected 0 oom_kill events in StepId=77.0.",
    "lsf": "MEMLIMIT\n      32 G",
    "pbs": "#PBS -l select=1:ncpus=16:mem=32gb",
    "earlyoom": "sending SIGTERM when mem avail <= 10.00% and swap free <= 10.00%",
    "systemd-oomd": "systemd[1]: Started systemd-oomd.service - Userspace Out-Of-Memory (OOM) Killer.",
    "ray": "The node memory monitor kills workers above a threshold of 0.95 (RAY_memory_usage_threshold).",
    "program": "warning: 91 % of host memory in use, the job may be killed if it runs out of memory",
}


@pytest.mark.parametrize("said", KILLS.values(), ids=KILLS.keys())
def test_what_a_batch_system_says_of_memory_is_evidence_for_the_killed_rank(
    diagnose_texts: Diagnose, said: str
) -> None:
    exits = texts.table({0: 1, 1: -9, 2: -15}, first=0)
    (finding,) = diagnose_texts("\n".join([said, exits])).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", (1,))
    assert finding.advice == (HOST_MEMORY,)
    assert any("OOM killer" in fact or "memory" in fact for fact in finding.evidence)


@pytest.mark.parametrize("said", KILLS.values(), ids=KILLS.keys())
def test_a_kill_for_memory_without_a_rank_is_named_without_a_culprit(diagnose_texts: Diagnose, said: str) -> None:
    (finding,) = diagnose_texts(f"Starting elastic_operator with launch configs\nepoch 1 loss 2.1\n{said}\n").findings
    assert (finding.kind, finding.culprit_ranks, finding.advice) == ("rank-killed", (), (HOST_MEMORY,))


@pytest.mark.parametrize("said", NO_KILLS.values(), ids=NO_KILLS.keys())
def test_words_about_memory_that_report_no_kill_are_no_finding(diagnose_texts: Diagnose, said: str) -> None:
    assert diagnose_texts(f"Starting elastic_operator with launch configs\n{said}\nepoch 1 loss 2.1\n").findings == ()


@pytest.mark.parametrize("said", NO_KILLS.values(), ids=NO_KILLS.keys())
def test_a_killed_rank_is_not_said_to_have_run_out_of_memory_without_a_report(
    diagnose_texts: Diagnose, said: str
) -> None:
    (finding,) = diagnose_texts("\n".join([said, texts.table({0: 1, 1: -9, 2: -15}, first=0)])).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", (1,))
    assert finding.advice != (HOST_MEMORY,)
