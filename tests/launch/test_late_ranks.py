"""A late rank is sampled beside one that is on time: the lines that it has more of, and what it does there."""

import json
from pathlib import Path

import pytest

from dtprof.launch.late_ranks import (
    Difference,
    WorkRates,
    compare_profiles,
    describe_work,
    read_profile,
)
from dtprof.launch.work_counters import WorkCounters
from dtprof.records import paths
from dtprof.records.nodes.late_lines import read_late_lines

MAIN = "thread (7): MainThread;<module> (/home/me/train.py:30)"
WAIT = f"{MAIN};all_reduce (/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py:2800)"
LOADER = "/usr/lib/python3/site-packages/torch/utils/data/dataloader.py"


def test_the_line_that_the_late_rank_has_more_of_is_named_and_waits_do_not_count() -> None:
    late = read_profile(
        f"{MAIN};load (/home/me/train.py:5) 60\n{MAIN} 20\n{WAIT} 20\nthread (8): other;f (/a.py:1) 90\n"
    )
    on_time = read_profile(f"{MAIN};load (/home/me/train.py:5) 10\n{MAIN} 20\n{WAIT} 70\n")
    assert late.samples == on_time.samples == 100
    found = compare_profiles(late, on_time)
    assert found is not None
    assert (found.file, found.line, found.function, found.share) == ("/home/me/train.py", 5, "load", 0.5)
    assert compare_profiles(on_time, on_time) is None
    assert compare_profiles(read_profile(f"{MAIN} 3\n"), on_time) is None  # too few samples


def test_a_loader_that_waits_for_its_workers_is_named_and_not_the_call_in_which_it_waits() -> None:
    selector = "/usr/lib/python3.11/selectors.py"
    loading = f"{MAIN};__next__ ({LOADER}:734);_get_data ({LOADER}:1300);select ({selector}:415)"
    found = compare_profiles(read_profile(f"{loading} 60\n{WAIT} 40\n"), read_profile(f"{loading} 10\n{WAIT} 90\n"))
    assert found is not None
    assert (found.line, found.inner_file) == (30, LOADER)


@pytest.mark.parametrize(
    ("inner", "cpu_s", "io_bytes", "words"),
    [
        ((LOADER, "__next__"), 0.1, 0, "it waits for its data loader"),
        (("/home/me/train.py", "load"), 0.1, 50_000_000, "it reads and writes files or pipes, 25 MB a second"),
        (("/home/me/train.py", "load"), 0.1, 0, "it sleeps or waits, using 5 % of a core"),
        (("/usr/lib/python3/json/decoder.py", "decode"), 1.8, 0, "it computes in decode, using 90 % of a core"),
    ],
)
def test_what_a_late_rank_does_is_said_by_its_work(
    inner: tuple[str, str], cpu_s: float, io_bytes: int, words: str
) -> None:
    place = Difference(
        file="/home/me/train.py", line=5, function="load", share=0.5, inner_file=inner[0], inner_function=inner[1]
    )
    before, after = WorkCounters(cpu_s=1.0, io_bytes=0), WorkCounters(cpu_s=1.0 + cpu_s, io_bytes=io_bytes)
    assert describe_work(place, WorkRates.between(before, after), WorkRates(bytes_per_s=0.0)) == words


def test_messages_that_both_ranks_send_are_no_files_and_a_short_stay_tells_no_work() -> None:
    place = Difference(
        file="/home/me/train.py",
        line=5,
        function="load",
        share=0.14,
        inner_file="/home/me/train.py",
        inner_function="f",
    )
    both = WorkRates(cores=0.8, bytes_per_s=13e6)
    assert describe_work(place, both, both) == "what it does is not known"  # 80 % of a core elsewhere, as a rule


def test_the_newest_sampled_line_of_a_rank_counts_and_damaged_rows_are_left_out(tmp_path: Path) -> None:
    row = {"t_ns": 5, "rank": 1, "file": "a.py", "line": 3, "function": "f", "share": 0.5, "does": "it computes"}
    rows = [row, row | {"t_ns": 9, "line": 4}, row | {"rank": "x"}, {"rank": 1}]
    (tmp_path / "node-a").mkdir()
    (tmp_path / "node-a" / paths.LATENESS).write_text("".join(json.dumps(each) + "\n" for each in rows))
    lines = read_late_lines(tmp_path)
    assert list(lines) == [1]
    assert lines[1].words == "at a.py:4 (f), 50 % of its time longer than a rank that is on time: it computes"
