"""Memory of ranks that grows from step to step and goes on growing."""

from collections.abc import Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import format_bytes, list_ranks
from dtprof.records.events import CUDA_ALLOCATED_BYTES


def find_leaks(case: Case) -> Iterator[Finding]:
    """Give one note for all ranks whose memory grows: a program may fill a buffer on purpose."""
    leaks = {number: rank.leak for number, rank in sorted(case.job.ranks.items()) if rank.leak is not None}
    if not leaks:
        return
    worst, growth = max(leaks.items(), key=lambda leak: leak[1].bytes_per_step)
    low, high = format_bytes(growth.low_bytes_per_step), format_bytes(growth.high_bytes_per_step)
    memory = "Device memory" if growth.sample == CUDA_ALLOCATED_BYTES else "Memory"
    keeps = "lists of losses that keep their graph (append loss.item()), caches, hooks and closures are usual causes"
    yield Finding(
        kind="memory-growth",
        severity="info",
        summary=f"{memory} of {list_ranks(leaks)} goes on growing, by {format_bytes(growth.bytes_per_step)} a step"
        f"{f' on rank {worst}' if len(leaks) > 1 else ''}.",
        culprit_ranks=tuple(leaks),
        waiting_ranks=(),
        grade=0.9,
        evidence=(
            f"{growth.sample} of rank {worst} grows by {low} to {high} a step (99.9 % confidence), also over the later "
            "half of its steps alone",
        ),
        advice=(f"See what keeps it with `dtprof trace RUN --now --memory` while the job runs: {keeps}.",),
    )


RULES: Declared = (Rule(kinds=("memory-growth",), stages=(Stage.WHOLE_JOB,), find=find_leaks),)
