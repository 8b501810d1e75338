"""Exceptions of the program: what helps against some, and what held the memory where it ran out."""

import json
from pathlib import Path

import pytest

from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.known_errors import DEVICE_MEMORY, NO_SUCH_MEMORY, find_advice, first_words
from dtprof.records import paths
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import RankBuilder, write_run

MIB = 2**20
ALLOCATOR = "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"


def crash(tmp_path: Path, kind: str, message: str, *, told: str | None = None) -> Finding:
    """Let rank 1 raise this while rank 0 waits; `told`: of which message the entry on memory is."""
    ranks = [RankBuilder(rank, world_size=2, closed=False) for rank in range(2)]
    for rank in ranks:
        rank.op("all_reduce", 10, 20)
    ranks[0].op("all_reduce", 30)
    ranks[1].exception(40, kind, message, line=7)
    run = write_run(tmp_path / "run", ranks, exit_status=1)
    if told is not None:
        held = {"parameters": 3 * MIB, "gradients": 0, "optimizer_state": 6 * MIB, "other": 40 * MIB}
        entry = {"k": "out_of_memory", "t_ns": 41, "device": "cuda:0", "message": told, "held_bytes": held}
        with (run / paths.rank_folder_name(1, 0) / paths.STRINGS).open("a") as file:
            file.write(json.dumps(entry | {"live_bytes": 49 * MIB, "largest": "other", "allocations": []}) + "\n")
    (finding,) = diagnose_run(run).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-crashed", (1,))
    return finding


def test_what_held_the_memory_that_ran_out_is_reported_largest_first(tmp_path: Path) -> None:
    message = "CUDA out of memory. Tried to allocate 20.00 GiB."
    finding = crash(tmp_path, "torch.OutOfMemoryError", message, told=message)
    assert "rank 1 held on cuda:0: 40.0 MiB other, 6.00 MiB optimizer state, 3.00 MiB parameters" in finding.evidence
    assert finding.advice == (DEVICE_MEMORY,)
    assert finding.summary.startswith("Rank 1 ran out of device memory at ")


def test_memory_that_ran_out_in_another_exception_is_not_known(tmp_path: Path) -> None:
    finding = crash(tmp_path, "ValueError", "boom", told="CUDA out of memory. Tried to allocate 20.00 GiB.")
    assert not any("held on" in fact for fact in finding.evidence)
    assert finding.advice[0].startswith("Fix the ValueError in rank 1")


def test_a_host_without_such_memory_is_no_mere_error_of_the_line(tmp_path: Path) -> None:
    finding = crash(tmp_path, "RuntimeError", f"{ALLOCATOR} allocate 281474976710656 bytes.")
    assert finding.advice == (NO_SUCH_MEMORY,)
    assert finding.summary.startswith("Rank 1 ran out of host memory at ")
    assert finding.evidence[0].startswith("rank 1: RuntimeError: DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    ("kind", "message", "words"),
    [
        ("RuntimeError", "Expected to have finished reduction in the prior iteration before ...", "find_unused"),
        ("RuntimeError", "CUDA error: device-side assert triggered", "CUDA_LAUNCH_BLOCKING"),
        ("OSError", "[Errno 24] Too many open files", "ulimit"),
        ("MemoryError", "", "ulimit -v"),
        ("OutOfMemoryError", "HIP out of memory", "on its device"),
    ],
)
def test_advice_is_given_where_the_text_of_an_exception_says_too_little(kind: str, message: str, words: str) -> None:
    advice = find_advice(kind, message)
    assert advice is not None
    assert words in advice


def test_an_exception_that_speaks_for_itself_is_left_to_do_so() -> None:
    assert find_advice("RuntimeError", "The size of tensor a (3) must match the size of tensor b (4)") is None
    assert find_advice("ValueError", "not enough memory of what was said") is None


def test_a_long_message_is_cut_and_shows_it() -> None:
    assert first_words("boom\nand more") == "boom"
    assert first_words("x" * 160) == "x" * 160
    cut = first_words("x" * 161)
    assert (len(cut), cut[-4:]) == (160, "x...")
    assert first_words("  \n") == ""


def test_the_line_at_which_a_rank_heard_of_a_dead_worker_is_said_to_be_no_more(tmp_path: Path) -> None:
    message = "DataLoader worker (pid 7) is killed by signal: Segmentation fault."
    assert "num_workers=0" in crash(tmp_path, "RuntimeError", message).advice[0]
    assert (
        "--shm-size"
        in crash(tmp_path / "bus", "RuntimeError", message.replace("Segmentation fault", "Bus error")).advice[0]
    )
