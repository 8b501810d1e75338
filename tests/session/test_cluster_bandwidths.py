"""The file of a cluster: what is kept, what it is compared with, and what plans take from it."""

import json
from pathlib import Path

import pytest

from dtprof.analysis.doctor.doctor_judgement import judge
from dtprof.errors import UsageError
from dtprof.records.rank_probes import CollectiveTimes
from dtprof.session import cluster_bandwidths
from dtprof.session.engines import make_engine
from dtprof.session.layout_plans import PlanRequest, plan
from tests.analysis.doctor.test_launch_checks_on_probes import sound_case

OPTIONS = ("params", "sequence", "batch", "ranks", "hosts", "memory", "flops", "link", "network", "top")


def measured(file: Path, *, times: int = 1) -> None:
    case = sound_case(hosts=2)
    case.joint.collectives = [
        CollectiveTimes(group="0", ranks=[0, 1, 2, 3], op="all_reduce", nbytes=1 << 20, times_ns=[1e6]),
        CollectiveTimes(group="node0", ranks=[0, 1], op="all_reduce", nbytes=1 << 20, times_ns=[1e5]),
        CollectiveTimes(group="node0", ranks=[0, 1], op="all_reduce", nbytes=1 << 10, times_ns=[1.0]),  # too small
    ]
    for _ in range(times):
        cluster_bandwidths.keep(file, cluster_bandwidths.read_earlier(file), judge(case))


def test_measurements_are_added_and_the_oldest_forgotten(tmp_path: Path) -> None:
    file = tmp_path / "a" / "cluster.json"
    measured(file, times=cluster_bandwidths.MOST_KEPT + 2)
    kept = cluster_bandwidths.read_earlier(file)
    assert len(kept) == cluster_bandwidths.MOST_KEPT
    assert kept[-1]["hosts"] == ["node0", "node1"]
    earlier = cluster_bandwidths.earlier_of(kept)
    assert earlier.count == cluster_bandwidths.MOST_KEPT
    assert earlier.gb_per_s["gloo", "node0", "node1"] == 1.0
    assert earlier.gb_per_s["gloo", "node0", "node0"] == 10.0


def test_plans_take_bandwidths_from_it(tmp_path: Path) -> None:
    """1 MiB on 4 ranks of 2 hosts in 1 ms: 1.5 * 1.048576 GB/s; on 2 ranks of one host in 0.1 ms: 10.48576 GB/s."""
    file = tmp_path / "cluster.json"
    measured(file)
    rates = cluster_bandwidths.read_link_rates(file)
    assert rates.network_bytes_per_s == pytest.approx(1.572864e9)
    assert rates.link_bytes_per_s == pytest.approx(10.48576e9)
    texts = dict.fromkeys(OPTIONS) | {"params": "1e8", "ranks": "16", "hosts": "2", "flops": "1", "top": "1"}
    of_file = plan(PlanRequest(texts=texts, runs=(file,)), make_engine("local"))
    given = texts | {"link": "10.48576", "network": "1.572864"}
    typed = plan(PlanRequest(texts=given), make_engine("local"))
    assert of_file.plans.plans[0].step_ns == pytest.approx(typed.plans.plans[0].step_ns)
    assert of_file.plans.plans[0].exposed_ns


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 2, "measurements": []}', '{"schema": 1}', "\x00"])
def test_another_file_is_refused_in_one_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "cluster.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"expected a file that dtprof doctor wrote"):
        cluster_bandwidths.read_earlier(file)


def test_rates_that_are_no_numbers_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    row = {"backend": "gloo", "op": "all_reduce", "bytes": "1", "hosts": 2, "busbw_gb_per_s": "fast"}
    document = {"schema": 1, "measurements": [7, {"pairs": [{"gb_per_s": None}, 3], "bandwidth": [row, None]}]}
    file.write_text(json.dumps(document), encoding="utf-8")
    assert cluster_bandwidths.earlier_of(cluster_bandwidths.read_earlier(file)).gb_per_s == {}
    assert cluster_bandwidths.read_link_rates(file).network_bytes_per_s is None


def test_a_cluster_is_named_by_its_scheduler_or_its_hosts() -> None:
    def name(hosts: list[str], **environment: str) -> str:
        return cluster_bandwidths.default_file(hosts, {"XDG_DATA_HOME": "/data"} | environment).as_posix()

    assert name(["b"]) == "/data/dtprof/clusters/b.json"
    assert name(["b", "a"]) == name(["a", "b"]) != name(["a", "c"])
    assert name(["a"], SLURM_CLUSTER_NAME="../x y") == "/data/dtprof/clusters/_x_y.json"
