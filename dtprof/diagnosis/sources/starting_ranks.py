"""Ranks that were started and left no record: their processes were seen when the job made no progress."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from dtprof.diagnosis.job_state import RankState, main_stack
from dtprof.diagnosis.stack_groups import read_stacks

_PID = re.compile("[0-9]{1,10}")


def find_starting(
    documents: Iterable[Mapping[str, Any]],
    *,
    known: Collection[int],
    world_size: int,
) -> dict[int, RankState]:
    """Return the ranks without a record whose processes were seen, with their stacks.

    Parameters:
        documents: the stacks taken on each node, as `launch.stack_sampler` writes them; what is damaged is skipped.
        known: ranks that left records.
        world_size: ranks of the job.
    """
    found: dict[int, RankState] = {}
    for document in documents:
        processes, t_ns = document.get("processes"), document.get("t_ns")
        if not isinstance(processes, dict) or not isinstance(t_ns, int):
            continue
        ranks = {int(pid): rank for pid, seen in processes.items() if (rank := _rank_of(pid, seen)) is not None}
        for process in read_stacks(document, ranks):
            if process.rank in known or not 0 <= process.rank < world_size or process.state == "gone":
                continue
            stack = main_stack(process)
            found[process.rank] = RankState(
                rank=process.rank, attempt=0, pid=process.pid, host="", last_ns=t_ns, stack=stack
            )
    return found


def _rank_of(pid: str, seen: Any) -> int | None:
    rank = seen.get("rank") if isinstance(seen, dict) else None
    return rank if type(rank) is int and _PID.fullmatch(pid) else None
