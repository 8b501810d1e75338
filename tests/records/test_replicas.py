"""Replicas of a job and its restarts, told apart by when processes were active and where they met."""

import json
from pathlib import Path

import pytest

from dtprof.analysis.run_summary import summarise
from dtprof.records.reader import open_run
from dtprof.records.replicas import ReplicaProcess, describe_replicas, separate_replicas
from tests.builders import WALL_CLOCK_NS, RankBuilder, write_run

Row = tuple[int, int, str, int, int]  # rank, attempt, rendezvous, begin, end


def separate(rows: list[Row], parents: dict[int, int] | None = None) -> tuple[dict[int, list[tuple[int, str]]], int]:
    """Return the folders by rank as names, and the number of replicas; pids count rows from 100."""
    known = {}
    folders: dict[int, list[tuple[int, Path]]] = {}
    for pid, (rank, attempt, rendezvous, begin, end) in enumerate(rows, 100):
        path = Path(f"{rank}.{attempt}")
        parent = (parents or {}).get(pid, 1)
        known[path] = ReplicaProcess(
            rank=rank,
            attempt=attempt,
            folder=path,
            pid=pid,
            parent=parent,
            rendezvous=rendezvous,
            begin_ns=begin,
            end_ns=end,
        )
        folders.setdefault(rank, []).append((attempt, path))
    for attempts in folders.values():
        attempts.sort()
    found, number = separate_replicas(folders, lambda _rank, _attempt, path: known[path])
    return {rank: [(attempt, str(path)) for attempt, path in own] for rank, own in found.items()}, number


def test_processes_one_after_the_other_are_attempts() -> None:
    rows: list[Row] = [(0, 0, "a:1", 0, 10), (1, 0, "a:1", 0, 10), (0, 1, "a:2", 20, 30), (1, 1, "a:2", 20, 30)]
    assert separate(rows) == ({0: [(0, "0.0"), (1, "0.1")], 1: [(0, "1.0"), (1, "1.1")]}, 1)


def test_programs_side_by_side_are_replicas() -> None:
    assert separate([(0, 0, "host 7", 0, 10), (0, 1, "host 7", 1, 11)]) == ({0: [(0, "0.0")], 1: [(0, "0.1")]}, 2)


def test_ranks_of_a_replica_stay_together_whichever_came_first() -> None:
    rows: list[Row] = [(0, 0, "a:1", 0, 10), (1, 1, "a:1", 2, 10), (0, 1, "a:2", 1, 11), (1, 0, "a:2", 1, 11)]
    found = {0: [(0, "0.0")], 1: [(0, "1.1")], 2: [(0, "0.1")], 3: [(0, "1.0")]}
    assert separate(rows) == (found, 2)


def test_replica_that_was_restarted_has_attempts_and_the_other_is_as_new() -> None:
    rows: list[Row] = [(0, 0, "group 0", 0, 90), (0, 1, "group 1", 0, 30), (0, 2, "group 1", 50, 90)]
    assert separate(rows) == ({0: [(1, "0.0")], 1: [(0, "0.1"), (1, "0.2")]}, 2)


def test_process_that_starts_the_ranks_is_no_replica_of_them() -> None:
    rows: list[Row] = [(0, 0, "host 1", 0, 90), (0, 1, "a:1", 10, 80), (1, 0, "a:1", 10, 80)]
    assert separate(rows, {101: 100, 102: 100})[1] == 1


@pytest.mark.parametrize(("number", "first"), [(2, 2), (4, 1)])
def test_sentence_names_the_first_rank_of_the_second_replica(number: int, first: int) -> None:
    sentence = describe_replicas(number, {rank: [] for rank in range(4)})
    assert sentence.startswith(f"replicas: {number} groups of ranks ran under the same numbers")
    assert f"rank {first} is rank 0 of the second" in sentence


def test_groups_of_a_replica_have_its_ranks(tmp_path: Path) -> None:
    builders = [
        RankBuilder(rank, world_size=2, attempt=attempt, started_later_s=0) for attempt in (0, 1) for rank in (0, 1)
    ]
    for builder in builders:
        builder.op("all_reduce", 10, 20)
    write_run(tmp_path, builders)
    run = open_run(tmp_path)
    assert sorted(run.folders) == [0, 1, 2, 3]
    assert [run.load(rank).rank for rank in run.folders] == [0, 1, 2, 3]
    members = [next(iter(run.load(rank).groups.values())).ranks for rank in run.folders]
    assert members == [(0, 1), (0, 1), (2, 3), (2, 3)]
    summary = summarise(run)
    assert (summary.world_size, summary.complete) == (4, True)
    assert any(text.startswith("replicas: 2 groups of ranks") for text in summary.cannot_tell)
    assert not any("restarted" in text for text in summary.cannot_tell)


def test_named_replica_groups_are_replicas_also_where_one_ended_before_the_other_began() -> None:
    rows: list[Row] = [(0, 0, "replica group 0", 0, 10), (0, 1, "replica group 1", 20, 30)]
    assert separate(rows) == ({0: [(0, "0.0")], 1: [(0, "0.1")]}, 2)


def test_programs_that_start_together_are_replicas_also_where_their_steps_are_not_at_the_same_time(
    tmp_path: Path,
) -> None:
    builders = [RankBuilder(0, world_size=1, attempt=attempt, started_later_s=10 * attempt) for attempt in (0, 1)]
    for pid, builder in enumerate(builders, 100):
        builder.pid = pid
        builder.op("barrier", 10, 20)
    write_run(tmp_path, builders)
    assert open_run(tmp_path).manifest.replicas == 1
    # The second one began to import torch with the first one, and was slower.
    row = {"pid": 101, "host": "host-a", "realtime_ns": WALL_CLOCK_NS - 1}
    (tmp_path / "node-host-a").mkdir(exist_ok=True)
    (tmp_path / "node-host-a" / "processes.jsonl").write_text(json.dumps(row) + "\n")
    assert (open_run(tmp_path).manifest.replicas, sorted(open_run(tmp_path).folders)) == (2, [0, 1])


def test_process_of_a_named_replica_group_that_overlaps_the_one_before_is_its_next_attempt() -> None:
    rows: list[Row] = [
        (0, 0, "replica group 0", 0, 10),
        (0, 1, "replica group 1", 0, 30),
        (0, 2, "replica group 0", 9, 30),
    ]
    assert separate(rows) == ({0: [(0, "0.0"), (1, "0.2")], 1: [(1, "0.1")]}, 2)
