"""Where ranks spend time that records do not explain: late ranks beside others, a rank alone over some steps."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from dtprof.launch.hot_lines import find_hot_lines
from dtprof.launch.line_sampler import Progress, compare_profiles
from dtprof.launch.stack_profiles import Frame, ProfiledLine, WorkRates, describe_work, read_profile
from dtprof.launch.work_counters import WorkCounters
from dtprof.records import paths
from dtprof.records.nodes.sampled_lines import read_hot_lines, read_late_lines
from dtprof.records.tables import SPAN, RankTables
from dtprof.report.wording import hot_line_words

SITE = "/usr/lib/python3/site-packages"
MAIN = "thread (7): MainThread;<module> (/home/me/train.py:30)"
WAIT = f"{MAIN};all_reduce ({SITE}/torch/distributed/distributed_c10d.py:2800)"
LOADER = f"{SITE}/torch/utils/data/dataloader.py"


def test_the_line_that_the_late_rank_has_more_of_is_named_and_waits_do_not_count() -> None:
    late = read_profile(
        f"{MAIN};load (/home/me/train.py:5) 60\n{MAIN} 20\n{WAIT} 20\nthread (8): other;f (/a.py:1) 90\n"
    )
    on_time = read_profile(f"{MAIN};load (/home/me/train.py:5) 10\n{MAIN} 20\n{WAIT} 70\n")
    assert late.samples == on_time.samples == 100
    found = compare_profiles(late, on_time)
    assert found is not None
    assert (found.frame, found.share) == (("/home/me/train.py", 5, "load"), 0.5)
    assert compare_profiles(on_time, on_time) is None
    assert compare_profiles(read_profile(f"{MAIN} 3\n"), on_time) is None  # too few samples


def test_a_loader_that_waits_for_its_workers_is_named_and_not_the_call_in_which_it_waits() -> None:
    selector = "/usr/lib/python3.11/selectors.py"
    loading = f"{MAIN};__next__ ({LOADER}:734);_get_data ({LOADER}:1300);select ({selector}:415)"
    found = compare_profiles(read_profile(f"{loading} 60\n{WAIT} 40\n"), read_profile(f"{loading} 10\n{WAIT} 90\n"))
    assert found is not None
    assert (found.frame.line, found.innermost.file) == (30, LOADER)


@pytest.mark.parametrize(
    ("inner", "after", "words"),
    [
        ((LOADER, "__next__"), WorkCounters(cpu_s=1.1), "it waits for its data loader"),
        (
            ("/home/me/train.py", "load"),
            WorkCounters(cpu_s=1.1, io_bytes=50_000_000),
            "it reads and writes files or pipes, 25 MB a second",
        ),
        (("/home/me/train.py", "load"), WorkCounters(cpu_s=1.1), "it sleeps or waits, using 5 % of a core"),
        ((f"{SITE}/json/decoder.py", "decode"), WorkCounters(cpu_s=2.8), "it computes in decode, using 90 % of a core"),
        (  # on a busy host a process that computes gets little of a core, as one that sleeps does
            ("/home/me/train.py", "load"),
            WorkCounters(cpu_s=1.2, delayed_s=1.6),
            "it computes, using 10 % of a core and waiting for one 80 % of the time",
        ),
    ],
)
def test_what_a_late_rank_does_is_said_by_its_work(inner: tuple[str, str], after: WorkCounters, words: str) -> None:
    rates = WorkRates.between(WorkCounters(cpu_s=1.0, io_bytes=0, delayed_s=0.0), after, 2.0)
    assert describe_work(_line(*inner, share=0.5), rates, WorkRates(bytes_per_s=0.0)) == words


def test_messages_that_both_ranks_send_are_no_files_and_a_short_stay_tells_no_work() -> None:
    both = WorkRates(cores=0.8, bytes_per_s=13e6)  # 80 % of a core elsewhere, as a rule
    assert describe_work(_line("/home/me/train.py", "f", share=0.14), both, both) is None


def _line(inner_file: str, inner_function: str, *, share: float) -> ProfiledLine:
    frame, innermost = Frame("/home/me/train.py", 5, "load"), Frame(inner_file, 5, inner_function)
    return ProfiledLine(frame=frame, share=share, innermost=innermost)


def test_hot_lines_are_the_deepest_that_hold_most_of_their_caller_outside_of_what_torch_runs() -> None:
    loop = "thread (7): MainThread;<module> (/home/me/train.py:50);fit (/home/me/train.py:30)"
    batch = "thread (7): MainThread;<module> (/home/me/train.py:50);fit (/home/me/train.py:20)"
    own = "thread (7): MainThread;<module> (/home/me/train.py:50);fit (/home/me/train.py:22)"
    words = f"{batch};words (/home/me/text.py:7)"
    lines = find_hot_lines(
        read_profile(
            # A forward pass and its lines; the backward pass; an operation.
            f"{loop};_call_impl ({SITE}/torch/nn/modules/module.py:1);forward (/home/me/model.py:4) 60\n"
            f"{loop};backward ({SITE}/torch/_tensor.py:1);run ({SITE}/torch/autograd/graph.py:1) 40\n"
            f"{WAIT} 20\n"
            # One line of `words` holds most of its caller's time, in a comprehension.
            f"{words};<listcomp> (/home/me/text.py:7);sub ({SITE}/re/__init__.py:8) 30\n"
            f"{words} 10\n"
            f"{batch};pad (/home/me/text.py:19) 4\n"
            # Time spread over the lines of a function belongs to its call.
            + "".join(f"{own};plot (/home/me/plots.py:{line}) 9\n" for line in (1, 2, 3))
            + f"{loop};log (/home/me/train.py:70) 9\n"  # less than a tenth
        )
    )
    assert [(line.frame, line.share) for line in lines] == [
        (("/home/me/text.py", 7, "words"), 0.2),
        (("/home/me/train.py", 22, "fit"), 0.135),
    ]
    assert lines[0].innermost.function == "sub"
    assert find_hot_lines(read_profile(f"{own} 99\n")) == []  # too few samples


def test_the_lowest_rank_of_a_host_is_sampled_once_its_steps_are_steady() -> None:
    progress = Progress()
    for rank, pid, steps in ((3, 30, range(4)), (2, 20, range(4)), (3, 30, range(4, 30))):
        progress.take(_recorded(rank, pid, steps, step_s=0.5))
    assert (progress.rank, progress.pid, progress.step_s()) == (2, 20, None)
    progress.take(_recorded(2, 20, range(4, 12), step_s=0.5))
    assert progress.step_s() == pytest.approx(0.5)
    progress.take(_recorded(2, 21, range(12), step_s=0.2))  # restarted, and too little time has passed since
    assert (progress.pid, progress.step_s()) == (21, None)


def _recorded(rank: int, pid: int, steps: range, *, step_s: float) -> RankTables:
    spans = np.zeros(len(steps), SPAN)
    spans["step"], spans["begin_ns"] = steps, [round(step * step_s * 1e9) for step in steps]
    return cast(RankTables, SimpleNamespace(rank=rank, pid=pid, spans=spans))


def test_the_newest_sampled_line_of_a_rank_counts_and_damaged_rows_are_left_out(tmp_path: Path) -> None:
    row = {"t_ns": 5, "rank": 1, "file": "a.py", "line": 3, "function": "f", "share": 0.5, "does": "it computes"}
    rows = [row, row | {"t_ns": 9, "line": 4}, row | {"rank": "x"}, {"rank": 1}]
    (tmp_path / "node-a").mkdir()
    (tmp_path / "node-a" / paths.LATENESS).write_text("".join(json.dumps(each) + "\n" for each in rows))
    lines = read_late_lines(tmp_path)
    assert list(lines) == [1]
    assert lines[1].words == "at a.py:4 (f), 50 % of its time longer than a rank that is on time: it computes"


def test_the_lines_of_the_newest_sampling_of_a_rank_count(tmp_path: Path) -> None:
    line = {
        "file": "/home/me/a.py",
        "line": 3,
        "function": "f",
        "share": 0.5,
        "inner_function": "f",
        "does": "it computes",
    }
    rows = [
        {"t_ns": 9, "rank": 0, "lines": [line | {"line": 7, "share": 0.25, "inner_function": "g", "does": None}, line]},
        {"t_ns": 5, "rank": 0, "lines": [line | {"line": 4}]},
        {"t_ns": 5, "rank": 2, "lines": []},
        {"t_ns": 5, "rank": 1, "lines": [{"file": "a.py"}]},
        [],
    ]
    (tmp_path / "node-a").mkdir()
    (tmp_path / "node-a" / paths.HOT_LINES).write_text("".join(json.dumps(each) + "\n" for each in rows))
    first, second = read_hot_lines(tmp_path)
    assert hot_line_words(first) == "a.py:3 in f takes 50 % of the time of rank 0: it computes"
    assert hot_line_words(second) == "a.py:7 in f takes 25 % of the time of rank 0, mostly in g"
