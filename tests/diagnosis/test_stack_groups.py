"""Stacks of many ranks, merged."""

from typing import Any

from dtprof.diagnosis.stack_groups import RankStack, group_stacks, read_stacks
from dtprof.report.documents.stacks_json import stacks_json
from dtprof.report.text.stacks_text import stacks_text


def frame(function: str, line: int, file: str = "/job/train.py") -> dict[str, Any]:
    return {"name": function, "filename": file, "line": line}


def process(*frames: dict[str, Any], thread: str = "MainThread", **facts: Any) -> dict[str, Any]:
    """Describe a process as `launch.stack_sampler` does; frames innermost first."""
    return {
        "state": "sleeping",
        "cpu_share": 0.0,
        "threads": [{"thread_name": thread, "frames": list(frames)}],
        **facts,
    }


WAITS = process(
    frame("all_reduce", 2890, "/site-packages/torch/distributed/c10d.py"), frame("main", 61), frame("top", 88)
)
LOADS = process(frame("load", 30), frame("main", 57), frame("top", 88), cpu_share=1.0)


def stacks(**processes: dict[str, Any]) -> list[RankStack]:
    document = {"processes": {pid.removeprefix("pid"): facts for pid, facts in processes.items()}}
    return read_stacks(document, {100 + rank: rank for rank in range(4)})


def test_the_rank_that_differs_comes_first_with_the_frames_it_shares() -> None:
    first, rest = group_stacks(stacks(pid100=WAITS, pid101=WAITS, pid102=LOADS, pid103=WAITS))
    assert (first.ranks, rest.ranks) == ((2,), (0, 1, 3))
    assert first.shared == 1  # both come from line 88 of top, and then from other lines of main
    assert rest.shared == 0
    assert [(one.function, one.line) for one in first.frames] == [("load", 30), ("main", 57), ("top", 88)]


def test_text_marks_the_line_from_which_a_rank_differs() -> None:
    text = stacks_text(stacks(pid100=WAITS, pid101=WAITS, pid102=LOADS), all_threads=False, notes=())
    assert "3 ranks, 2 different stacks" in text
    marked = [line for line in text.splitlines() if line.startswith("  >")]
    assert marked == ["  > /job/train.py:57 main   <- other than ranks 0, 1"]
    assert "rank 2 (sleeping, 100 % of a core)" in text
    assert "    torch/distributed/c10d.py:2890 all_reduce" in text  # where it is installed says nothing


def test_equal_stacks_are_said_to_be_equal() -> None:
    text = stacks_text(stacks(pid100=WAITS, pid101=WAITS), all_threads=False, notes=())
    assert text.splitlines()[0] == "ranks 0, 1: the main thread is at the same line"


def test_addresses_and_template_arguments_of_native_code_do_not_part_ranks() -> None:
    def native(address: str) -> dict[str, Any]:
        call = frame("at::call<std::vector<int, std::allocator<int> > >", 0, "/x/libtorch_cpu.so")
        return process(call, frame(address, 0, "/lib/libc.so.6"), frame("main", 61))

    (group,) = both = group_stacks(stacks(pid100=native("0x7f01"), pid101=native("0x7f02")))
    assert len(both) == 1
    assert group.ranks == (0, 1)
    text = stacks_text(stacks(pid100=native("0x7f01")), all_threads=False, notes=())
    assert "    at::call (libtorch_cpu.so)" in text


def test_a_rank_without_a_stack_is_named_with_the_reason() -> None:
    stopped = {"state": "stopped", "reason": "the process is stopped", "cpu_share": 0.0}
    found = stacks(pid100=WAITS, pid101=stopped)
    text = stacks_text(found, all_threads=False, notes=["note"])
    assert "rank 1 (pid 101): no stack: the process is stopped" in text
    assert text.endswith("note")
    assert stacks_text(stacks(pid101=stopped), all_threads=False, notes=()).startswith("no stack of 1 rank can be read")


def test_the_main_thread_counts_and_others_are_shown_on_demand() -> None:
    two = process(frame("main", 61))
    two["threads"].insert(0, {"thread_name": "loader", "frames": [frame("read", 5)], "active": True})
    found = stacks(pid100=two)
    assert [one.function for one in group_stacks(found)[0].frames] == ["main"]
    assert "rank 0, thread loader (active)" in stacks_text(found, all_threads=True, notes=())
    assert "loader" not in stacks_text(found, all_threads=False, notes=())


def test_more_stacks_than_fit_are_counted() -> None:
    document = {"processes": {str(pid): process(frame("main", pid)) for pid in range(20)}}
    found = read_stacks(document, {pid: pid for pid in range(20)})
    assert "12 more stacks, of ranks 8-19" in stacks_text(found, all_threads=False, notes=())


def test_damaged_documents_and_processes_of_no_rank_are_skipped() -> None:
    for processes in (None, [], {"x": {}}, {"100": None}, {"999": WAITS}):
        assert read_stacks({"processes": processes}, {100: 0}) == []
    (bare,) = read_stacks({"processes": {"100": {"threads": [None, {"frames": [None, 3]}]}}}, {100: 0})
    assert stacks_text([bare], all_threads=True, notes=())


def test_json_says_the_same() -> None:
    document = stacks_json(stacks(pid100=WAITS, pid102=LOADS), taken="now", t_ns=5, notes=["n"])
    assert (document["schema"], document["taken"], document["t_ns"], document["cannot_tell"]) == (1, "now", 5, ["n"])
    assert [group["ranks"] for group in document["groups"]] == [(0,), (2,)]
    assert [rank["cpu_share"] for rank in document["ranks"]] == [0.0, 1.0]
