"""Tests of `dtprof runs`, of its index and of what it removes."""

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from dtprof.cli.main import main
from dtprof.records import paths, remote, run_facts, writer
from dtprof.session.run_index import RunFilter, RunIndex
from dtprof.session.run_retention import Policy
from tests.analysis.noisy_runs import build_ranks
from tests.builders import write_run

NOW_NS = time.time_ns()
DAY_NS = 86_400_000_000_000


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the index out of the user's cache."""
    monkeypatch.setenv("DTPROF_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))


def put(store: Path, name: str, *, age_days: float = 1, took_s: float = 60, **fields: Any) -> Path:
    """Write the manifest of a run of two ranks, by default one that ended well on host `a`."""
    run = store / name
    for rank in range(2):
        (run / f"rank-{rank:05d}.0").mkdir(parents=True)
    started = NOW_NS - int(age_days * DAY_NS)
    document = {
        "format_version": 2,
        "command": ["torchrun", "train.py"],
        "hosts": ["a"],
        "boot_id": "another",
        "started_realtime_ns": started,
        "ended_realtime_ns": started + int(took_s * 1e9),
        "exit_status": 0,
        "stopped_on_hang": False,
        "hang_detected_ns": None,
    }
    (run / "run.json").write_text(json.dumps(document | fields))
    return run


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    """Return the runs that the command prints as JSON, by name."""
    assert main(["runs", *arguments, "--json"]) == 0
    return {row["name"]: row for row in json.loads(capsys.readouterr().out)["runs"]}


def test_outcomes_follow_from_manifest_exits_and_verdict(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pid = os.getpid()
    started_by = [1 << 22, 5, writer.boot_id()]  # no such process
    put(tmp_path, "ended", took_s=90)
    put(tmp_path, "crash", exit_status=1)
    put(tmp_path, "stopped", exit_status=-15)
    put(tmp_path, "hung-up", exit_status=-1)
    put(tmp_path, "hang", stopped_on_hang=True, exit_status=-15)
    put(tmp_path, "cut-off", ended_realtime_ns=0, exit_status=None, boot_id=writer.boot_id(), launcher_pid=1 << 22)
    own = {"boot_id": writer.boot_id(), "launcher_pid": pid, "launcher_start_ticks": writer.start_ticks(pid)}
    put(tmp_path, "running", ended_realtime_ns=0, exit_status=None, **own)
    run_facts.write_verdict(put(tmp_path, "slow"), "slow", "rank 1 is slow")
    auto = {"ended_realtime_ns": 0, "exit_status": None, "started_by": started_by}
    node = put(tmp_path, "auto-crash", **auto) / "node-a"
    node.mkdir()
    (node / "exits.jsonl").write_text('{"pid":1,"status":0}\n{"pid":2,"status":-9}\n')
    put(tmp_path, "auto-unknown", **auto)
    runs = listed(capsys, str(tmp_path))
    assert {name: row["outcome"] for name, row in runs.items()} == {
        **{name: name for name in ("ended", "crash", "stopped", "hang", "cut-off", "running", "slow")},
        "hung-up": "stopped",
        "auto-crash": "crash",
        "auto-unknown": "unknown",
    }
    assert runs["ended"]["took_ns"] == 90_000_000_000
    assert runs["ended"]["ranks"] == 2
    assert runs["running"]["took_ns"] is None
    assert runs["slow"]["summary"] == "rank 1 is slow"
    assert list(listed(capsys, str(tmp_path), "--outcome", "hang", "--outcome", "slow")) == ["hang", "slow"]


def test_filters_choose_by_time_host_user_and_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, "new", age_days=1, hosts=["node-7", "node-8"])
    put(tmp_path, "old", age_days=20, command=["python", "eval.py"])
    put(tmp_path / "alice", "inner", age_days=2)
    assert list(listed(capsys, str(tmp_path))) == ["new", "alice/inner", "old"]  # the newest first
    assert list(listed(capsys, str(tmp_path), "--since", "7d")) == ["new", "alice/inner"]
    assert list(listed(capsys, str(tmp_path), "--until", "2w")) == ["old"]
    assert list(listed(capsys, str(tmp_path), "--host", "node-*")) == ["new"]
    assert list(listed(capsys, str(tmp_path), "--name", "eval")) == ["old"]
    assert list(listed(capsys, str(tmp_path), "--name", "inn*")) == ["alice/inner"]
    assert list(listed(capsys, str(tmp_path), "--limit", "1")) == ["new"]
    assert len(listed(capsys, str(tmp_path), "--user", run_facts.user_name(os.getuid()))) == 3
    assert not listed(capsys, str(tmp_path), "--user", "nobody-of-this-name")


def test_the_index_reads_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        put(tmp_path, f"run-{number}")
    index = RunIndex(tmp_path)
    assert len(index.runs(RunFilter())) == 3
    read: list[str] = []
    read_facts = run_facts.read_facts
    monkeypatch.setattr(
        run_facts, "read_facts", lambda run, name, **rest: (read.append(name), read_facts(run, name, **rest))[1]
    )
    run_facts.write_verdict(tmp_path / "run-1", "risk", "a buffer is used early")
    shutil.rmtree(tmp_path / "run-2")
    by_name = {facts.name: facts.outcome for facts in index.runs(RunFilter())}
    assert by_name == {"run-0": "ended", "run-1": "risk"}
    assert read == ["run-1"]
    index.close()


def test_a_damaged_index_is_made_anew(tmp_path: Path) -> None:
    store = tmp_path / "store"
    put(store, "one")
    RunIndex(store).close()
    (file,) = remote.cache_folder().with_name("run-index").iterdir()
    file.write_bytes(b"no database" * 500)
    index = RunIndex(store)
    assert [facts.name for facts in index.runs(RunFilter())] == ["one"]
    index.close()


def test_links_and_hostile_manifests_are_no_facts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    elsewhere = put(tmp_path / "elsewhere", "secret", command=["not", "to", "be", "read"])
    (store / "linked-manifest").mkdir(parents=True)
    (store / "linked-manifest" / "run.json").symlink_to(elsewhere / "run.json")
    (store / "linked-folder").symlink_to(elsewhere)
    (store / "odd").mkdir()
    (store / "odd" / "run.json").write_text('{"command": 7, "hosts": {"a": 1}, "started_realtime_ns": 1e400}')
    (store / "deep").mkdir()
    (store / "deep" / "run.json").write_text("[" * 100_000)
    runs = listed(capsys, str(store))
    assert set(runs) == {"linked-manifest", "odd", "deep"}
    assert all(row["command"] == "" and row["outcome"] == "unknown" for row in runs.values())


def test_pruning_says_first_and_removes_only_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path, "old", age_days=40)
    put(tmp_path, "new", age_days=1)
    foreign = put(tmp_path, "old-with-data", age_days=40)
    (foreign / "thesis.tex").write_text("mine")
    assert main(["runs", str(tmp_path), "--until", "30d", "--prune"]) == 0
    assert "2 runs" in capsys.readouterr().out
    assert (tmp_path / "old").exists()
    assert main(["runs", str(tmp_path), "--until", "30d", "--prune", "--yes"]) == 1
    out, err = capsys.readouterr()
    assert "1 run removed" in out
    assert "thesis.tex" in err
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["new", "old-with-data"]


def test_pruning_takes_no_more_runs_than_the_limit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for age in (1, 2, 3):
        put(tmp_path, f"aged-{age}", age_days=age)
    assert main(["runs", str(tmp_path), "--limit", "1", "--prune", "--yes"]) == 0
    assert "1 run removed" in capsys.readouterr().out
    assert sorted(entry.name for entry in tmp_path.iterdir() if entry.is_dir()) == ["aged-2", "aged-3"]


def facts(name: str, *, age: float, outcome: str = "ended", size: int = 1, user: str = "u") -> run_facts.RunFacts:
    """Return the facts of a run of so many days ago and so many GiB."""
    return run_facts.RunFacts(
        name=name,
        user=user,
        hosts=(),
        command="",
        started_ns=int(NOW_NS - age * DAY_NS),
        ended_ns=0,
        exit_status=0,
        num_ranks=1,
        outcome=outcome,
        summary="",
        nbytes=size << 30,
    )


def test_a_policy_limits_each_day_of_each_user_and_the_oldest_plain_runs_of_it_go_first() -> None:
    since_midnight = NOW_NS % DAY_NS / DAY_NS
    today, yesterday = since_midnight / 4, since_midnight + 0.25  # ages in days; midnight is that of UTC
    runs = [
        facts("a", age=today + since_midnight / 4, size=2),
        facts("b", age=today, size=2),
        facts("hang", age=today + since_midnight / 2, size=2, outcome="hang"),
        facts("running", age=today, size=1, outcome="running"),
        facts("yesterday", age=yesterday, size=4),
        facts("of-another", age=today, size=4, user="v"),
    ]
    # u has 7 GiB of today: without a it has 5. What is kept of other days and users is theirs.
    going = {run.name: why for run, why in Policy(max_gb_per_day=5).surplus(runs, now_ns=NOW_NS)}
    assert going == {"a": "u has more than 5 GiB of one day"}
    # 4 GiB of each day: yesterday's still fit. 3: all of today's plain runs go, then yesterday's, and not the hang.
    assert {run.name for run, _ in Policy(max_gb_per_day=4).surplus(runs, now_ns=NOW_NS)} == {"a", "b"}
    going_of_3 = {run.name for run, _ in Policy(max_gb_per_day=3).surplus(runs, now_ns=NOW_NS)}
    assert going_of_3 == {"a", "b", "yesterday", "of-another"}


def test_a_policy_keeps_notable_runs_longer_and_a_users_newest() -> None:
    runs = [
        *(
            facts("old", age=15),
            facts("old-hang", age=15, outcome="hang"),
            facts("older-hang", age=100, outcome="hang"),
        ),
        *(facts("new", age=1, size=3), facts("newer", age=0.5, size=3), facts("running", age=90, outcome="running")),
    ]
    by_age = Policy(keep_days=14, keep_notable_days=60).surplus(runs, now_ns=NOW_NS)
    assert {run.name for run, _ in by_age} == {"old", "older-hang"}
    # 8 GiB stay after that; of those but 7 may: the older one of the plain runs goes, the hang stays.
    both = Policy(keep_days=14, keep_notable_days=60, max_gb_per_user=7).surplus(runs, now_ns=NOW_NS)
    assert {run.name for run, _ in both} == {"old", "older-hang", "new"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "no folder"),
        ([".", "--since", "soon"], "expected an age"),
        ([".", "--outcome", "bad"], "expected one of"),
        ([".", "--yes"], "without --prune"),
        ([".", "--prune", "--keep", "long"], "expected a time"),
        ([".", "--prune", "--compare"], "expected one of them"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["runs", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def write_measured(store: Path, name: str, *, age_days: float, slower_reduce_us: float = 0.0) -> None:
    """Write a whole run of two ranks that ended well."""
    run = write_run(store / name, build_ranks(1, slower_reduce_us=slower_reduce_us))
    document = json.loads((run / "run.json").read_text())
    started_ns = NOW_NS - int(age_days * DAY_NS)
    times = {"started_realtime_ns": started_ns, "ended_realtime_ns": started_ns + 10**9}
    (run / "run.json").write_text(json.dumps(document | times))


def test_runs_are_diagnosed_once_and_their_steps_measured_and_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_measured(tmp_path, "before", age_days=2)
    write_measured(tmp_path, "after", age_days=1, slower_reduce_us=2000.0)
    put(tmp_path, "empty", age_days=3)
    rows = listed(capsys, str(tmp_path))
    assert {rows[name]["outcome"] for name in ("before", "after")} == {"ended"}
    rows = listed(capsys, str(tmp_path), "--diagnose", "--name", "after")
    assert rows["after"]["outcome"] != "ended"
    assert (tmp_path / "after" / paths.VERDICT).exists()
    assert not (tmp_path / "before" / paths.VERDICT).exists(), "it was not asked for"
    rows = listed(capsys, str(tmp_path), "--compare", "--limit", "2")
    before, after = rows["before"], rows["after"]
    assert after["step_ns"] > before["step_ns"] > 0
    assert after["step_change"] == pytest.approx(after["step_ns"] / before["step_ns"] - 1)
    assert before["step_change"] is None
    assert listed(capsys, str(tmp_path), "--compare")["empty"]["step_ns"] is None
    # Measured once: the index holds it.
    monkeypatch.setattr("dtprof.session.run_measurement.summarise_opened", lambda *_: pytest.fail("measured again"))
    assert listed(capsys, str(tmp_path), "--compare", "--since", "60h")["after"]["step_ns"] == after["step_ns"]
