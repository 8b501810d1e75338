"""Launchers wait in a rendezvous for nodes that do not come."""

import os
from dataclasses import replace
from pathlib import Path

from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.diagnosis.job_state import JobState, RendezvousWait, assemble_job
from dtprof.diagnosis.sources.waiting_launchers import find_earlier, find_rendezvous, find_unwaiting
from dtprof.diagnosis.verdict import decide
from dtprof.records import paths
from dtprof.records.manifest import Manifest
from dtprof.records.nodes.node_samples import Sample, SampleFile
from tests.builders import RankBuilder
from tests.diagnosis.judging import build_job

WAIT = RendezvousWait(
    host="a", pid=7, waited_s=12.0, for_store=False, nodes=2, endpoint="a:29400", rdzv_id="5", ranks_per_node=4
)
NUMBERED = replace(WAIT, is_static=True, rdzv_id="", node_rank=0)


def job_of(*waits: RendezvousWait) -> JobState:
    manifest = Manifest(exit_status=None)
    return assemble_job(
        [], world_size=0, manifest=manifest, stalled=bool(waits), stopped_on_hang_ns=None, rendezvous=waits
    )


def verdict_on(*waits: RendezvousWait) -> Verdict:
    return decide(job_of(*waits))


def found(*waits: RendezvousWait) -> Finding:
    verdict = verdict_on(*waits)
    assert (verdict.outcome, [finding.kind for finding in verdict.findings]) == ("hang", ["rank-never-joined"])
    return verdict.findings[0]


def one_alone() -> JobState:
    return job_of(WAIT)


def ranks_that_run() -> JobState:
    """Return a job whose rendezvous was over after a launcher had been seen in it."""
    return build_job([RankBuilder(0, 1)], exit_status=0, stalled=False, rendezvous=(WAIT,))


FAULTY = {"rank-never-joined": one_alone}
SOUND = ranks_that_run


def test_launcher_that_waits_alone_is_named_with_its_rendezvous() -> None:
    finding = found(WAIT)
    assert finding.summary == (
        "The launcher on a waits in the rendezvous at a:29400 (id 5) for 1 of 2 nodes; no rank was started."
    )
    assert "process 7" in finding.evidence[0]
    assert "12 s" in finding.evidence[0]
    assert finding.leaves_open
    assert not finding.culprit_ranks


def test_others_may_have_come_of_which_the_run_knows_nothing() -> None:
    assert "for 1 to 3 of 4 nodes" in found(replace(WAIT, nodes=4)).summary
    second = replace(WAIT, host="b", nodes=4)
    summary = found(replace(WAIT, nodes=4), second).summary
    assert summary.startswith("2 launchers on a, b wait in the rendezvous")
    assert "for 1 to 2 of 4 nodes" in summary


def test_launchers_that_cannot_meet_are_told_the_option_in_which_they_differ() -> None:
    others = {
        "--rdzv-id": replace(WAIT, host="b", rdzv_id="6"),
        "--nnodes": replace(WAIT, host="b", nodes=3),
        "--rdzv-endpoint": replace(WAIT, host="b", endpoint="a:29401"),
    }
    for option, other in others.items():
        finding = found(WAIT, other)
        assert f"as they differ in {option};" in finding.summary
        assert finding.advice == (f"Give {option} the same value on every node.",)


def test_two_names_of_an_endpoint_tell_of_two_only_where_all_nodes_have_come() -> None:
    named = replace(WAIT, host="b", endpoint="10.0.0.1")  # with the default port
    assert "differ in --rdzv-endpoint" in found(WAIT, named).summary
    assert "differ" not in found(replace(WAIT, nodes=3), replace(named, nodes=3)).summary


def test_store_that_does_not_answer_is_told_apart() -> None:
    finding = found(replace(WAIT, for_store=True))
    assert "waits for the store of the rendezvous at a:29400 (id 5), which does not answer" in finding.summary
    assert not finding.culprit_ranks


def test_ranks_of_a_numbered_node_that_does_not_come_are_named() -> None:
    assert found(NUMBERED).culprit_ranks == (4, 5, 6, 7)
    assert found(replace(NUMBERED, node_rank=1, for_store=True)).culprit_ranks == (0, 1, 2, 3)
    assert found(replace(NUMBERED, nodes=3)).culprit_ranks == ()
    assert found(replace(NUMBERED, ranks_per_node=None)).culprit_ranks == ()


def test_the_host_of_the_allocation_that_has_not_come_is_named() -> None:
    finding = found(replace(WAIT, host="a.cluster", hosts=("a", "b"), hosts_from="SLURM_JOB_NODELIST"))
    assert finding.culprit_hosts == ("b",)
    assert "b has not come, of the hosts in SLURM_JOB_NODELIST." in finding.summary
    assert (finding.leaves_open, finding.confidence) == ((), 0.85)
    all_there = replace(WAIT, hosts=("a", "b"), hosts_from="SLURM_JOB_NODELIST")
    assert found(all_there, replace(all_there, host="b")).culprit_hosts == ()
    several = found(replace(WAIT, nodes=3, hosts=("a", "b", "c"), hosts_from="SLURM_JOB_NODELIST"))
    assert (several.culprit_hosts, several.confidence) == (("b", "c"), 0.6)
    assert found(replace(WAIT, hosts=("a", "b", "c"))).culprit_hosts == ()  # any two of them may be meant


def test_a_host_of_the_run_that_is_not_in_the_rendezvous_is_named() -> None:
    finding = decide(replace(job_of(WAIT), unwaiting_hosts=("b",))).findings[0]
    assert finding.culprit_hosts == ("b",)
    assert "dtprof run is on b, and its launcher is not in the rendezvous." in finding.summary


def test_a_host_that_has_been_there_for_as_long_would_have_said_that_it_waits(tmp_path: Path) -> None:
    for host, seconds in (("a", 60), ("b", 60), ("c", 20)):
        (tmp_path / f"node-{host}").mkdir()
        file = SampleFile(tmp_path / f"node-{host}", {"boot_id": host})
        for second in (0, seconds):
            file.append(Sample(t_ns=second * 1_000_000_000, host=[], cores=[], gpus={}, processes={}))
    assert find_unwaiting(tmp_path, [WAIT]) == ("b",)  # after 12 s, and two looks
    assert find_unwaiting(tmp_path, []) == ()


def test_hosts_of_the_newest_run_beside_it_like_it(tmp_path: Path) -> None:
    for number, (name, hosts) in enumerate((("older", "ac"), ("old", "ab"), ("large", "abc"), ("other", "cd"))):
        for host in hosts:
            (tmp_path / name / f"node-{host}").mkdir(parents=True)
        manifest = tmp_path / name / paths.MANIFEST
        manifest.write_text("{}")
        os.utime(manifest, (1000 + number, 1000 + number))
    run = tmp_path / "now"
    (run / "node-a").mkdir(parents=True)
    (run / paths.MANIFEST).write_text("{}")
    assert find_earlier(run, [WAIT]) == (("a", "b"), "old")
    assert find_earlier(run, []) == ((), "")
    finding = decide(replace(job_of(WAIT), earlier_hosts=(("a", "b"), "old"))).findings[0]
    assert (finding.culprit_hosts, finding.confidence) == (("b",), 0.6)
    assert "b has not come: it was in the run old with this host." in finding.summary


def test_once_a_rank_has_started_the_rendezvous_is_over() -> None:
    assert decide(ranks_that_run()).outcome == "healthy"
    assert verdict_on().outcome == "unknown"


def test_what_is_damaged_in_the_file_is_skipped() -> None:
    wait = {"waited_s": 12.0, "for_store": False, "nodes": 2, "endpoint": "a:29400", "id": "5", "ranks_per_node": 4}
    processes = {"7": {"rendezvous": wait}, "x": {"rendezvous": wait}, "8": {"rendezvous": 1}, "9": None}
    assert find_rendezvous({"node-a": {"processes": processes}, "node-b": {}, "node-c": {"processes": 3}}) == (WAIT,)
    damaged = {"7": {"rendezvous": {"nodes": -1, "waited_s": "x", "id": None}}}
    assert find_rendezvous({"node-a": {"processes": damaged}}) == (
        RendezvousWait(host="a", pid=7, waited_s=0.0, for_store=False, nodes=1),
    )
