"""Figures of the runs of a cluster, kept for plans to come."""

import json
from pathlib import Path

import pytest

from dtprof.analysis.planning.run_calibration import MeasuredRun, calibrate
from dtprof.cli.main import main
from dtprof.errors import UsageError
from dtprof.session.plan_calibrations import MOST_KEPT, keep_runs, read_runs
from tests.builders import RankBuilder, write_run

FAST = MeasuredRun(run="/a", flops_per_s=3e12, link_bytes_per_s=1e9, other_bytes=10.0, parameters=1e6, batch=8)
SLOW = MeasuredRun(run="/b", flops_per_s=1e12, link_bytes_per_s=None, other_bytes=30.0, parameters=9e6, batch=4)


def test_medians_are_of_the_runs_that_measured_the_figure() -> None:
    joined = calibrate([FAST, SLOW])
    assert (joined.flops_per_s, joined.link_bytes_per_s, joined.network_bytes_per_s) == (2e12, 1e9, None)
    assert (joined.other_bytes, joined.batch) == (20.0, 8)


def test_a_file_keeps_what_says_something_about_the_cluster_and_nothing_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    keep_runs(file, [], [FAST])
    (kept,) = read_runs(file)
    assert (kept.run, kept.flops_per_s, kept.link_bytes_per_s, kept.other_bytes) == ("/a", 3e12, 1e9, 10.0)
    assert (kept.parameters, kept.batch) == (None, None)


def test_a_run_that_is_measured_again_replaces_itself_and_the_oldest_go(tmp_path: Path) -> None:
    file = tmp_path / "cluster.json"
    keep_runs(file, [FAST, SLOW], [MeasuredRun(run="/a", flops_per_s=5e12)])
    assert [(run.run, run.flops_per_s) for run in read_runs(file)] == [("/b", 1e12), ("/a", 5e12)]
    keep_runs(file, [MeasuredRun(run=f"/{i}") for i in range(MOST_KEPT)], [SLOW])
    kept = read_runs(file)
    assert (len(kept), kept[0].run, kept[-1].run) == (MOST_KEPT, "/1", "/b")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "it is no JSON"),
        ("[]", "it has no runs of schema 1"),
        ('{"schema": 2, "runs": []}', "it has no runs of schema 1"),
        ('{"schema": 1, "runs": [3]}', "a run has no path"),
        ('{"schema": 1, "runs": [{"run": "/a", "flops_per_s": -1}]}', "flops_per_s of /a is -1"),
        ('{"schema": 1, "runs": [{"run": "/a", "flops_per_s": NaN}]}', "flops_per_s of /a is nan"),
    ],
)
def test_what_is_no_such_file_is_refused_with_the_reason(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "cluster.json").write_text(text)
    with pytest.raises(UsageError, match=why):
        read_runs(tmp_path / "cluster.json")


def test_a_plan_keeps_its_runs_and_a_later_plan_uses_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rank = RankBuilder(0, world_size=1)
    for step in range(5):
        rank.span("forward", 1000 * step, 1000 * step + 300)
        rank.span("backward", 1000 * step + 300, 1000 * step + 900)
        rank.span("optimizer", 1000 * step + 900, 1000 * step + 1000)
    run, file = write_run(tmp_path / "run", [rank]), tmp_path / "cluster.json"
    plan = ["plan", "--params", "1e6", "--ranks", "2", "--link", "10", "--calibration", str(file), "--json"]
    assert main([*plan, "--from", str(run)]) == 0
    document = json.loads(file.read_text())
    assert [row["run"] for row in document["runs"]] == [str(run.resolve())]
    capsys.readouterr()
    document["runs"][0]["flops_per_s"] = 1e12
    file.write_text(json.dumps(document))
    assert main(plan) == 0
    assert all(row["step_ns"] is not None for row in json.loads(capsys.readouterr().out)["plans"])
