"""Evidence from the devices of stalled ranks: their progress, what blocks them, their health."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from dtprof.diagnosis.blocked_ranks import operation_words
from dtprof.diagnosis.findings import Finding, at_line
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.formatting import list_ranks
from dtprof.job.issued_operations import Operation

MAX_TROUBLES = 4
CONNECTING_ADVICE = (
    "Look at how the members connect: NCCL_DEBUG=INFO, NCCL_SOCKET_IFNAME, firewalls; dtprof doctor tries all pairs."
)
NO_SAMPLES = "no GPUs were sampled"
XIDS = {
    13: "graphics engine exception",
    31: "memory page fault",
    43: "the GPU stopped processing",
    48: "double-bit ECC error",
    63: "row remapping recorded",
    64: "row remapping failed",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    92: "high rate of single-bit ECC errors",
    94: "contained ECC error",
    95: "uncontained ECC error",
    119: "GSP timeout",
    120: "GSP error",
}
"""Meaning of the Xid codes that end or stall kernels, by NVIDIA's driver documentation."""


def begin_words(operations: Mapping[int, Operation]) -> tuple[str, ...]:
    """Return the ranks whose devices started an operation and those whose did not; nothing where unknown."""
    begun = [rank for rank, operation in operations.items() if operation.done or operation.started]
    held = [rank for rank, operation in operations.items() if not operation.done and operation.started is False]
    if len(begun) + len(held) < len(operations):
        return ()
    if not held:
        done = [rank for rank, operation in operations.items() if operation.done]
        end = f"completed on {list_ranks(done)} only" if done else "completed on none"
        return (f"it was begun by the devices of {list_ranks(begun)}, and {end}",)
    return (
        f"it was begun by the devices of {list_ranks(begun) if begun else 'no rank'}, "
        f"not by those of {list_ranks(held)}",
    )


def connects(operation: Operation) -> bool:
    """Say whether NCCL, or another backend of devices, connects ranks within this operation: their first together.

    It does so when a group, or a pair of ranks for messages, is first used: in seconds, in large jobs in minutes.
    """
    return operation.on_device and (operation.nth if operation.p2p else operation.seq) == 0


def with_connecting(finding: Finding, operation: Operation) -> Finding:
    """Mark a finding on an operation in which its backend connects the ranks, and say so."""
    if not connects(operation):
        return finding
    together = "message between these ranks" if operation.p2p else "operation of these members"
    return replace(
        finding,
        is_early=True,
        evidence=(*finding.evidence, f"it is the first {together}, within which the backend connects them"),
        advice=(CONNECTING_ADVICE, *finding.advice),
    )


def place_words(job: JobState, ranks: Iterable[int]) -> tuple[str, ...]:
    """Return for each rank the last operation its device completed, its phase, and the call its host waits in."""
    return tuple(words for rank in ranks if (words := _place(job, job.ranks[rank])))


def _place(job: JobState, rank: RankState) -> str:
    last = next((o for o in reversed(rank.operations) if o.on_device and o.done), None)
    parts = [f"its device last completed {operation_words(job, last)}"] if last is not None else []
    if rank.device_phases:
        parts.append(f"its device is in phase {rank.device_phases[-1]}")
    if rank.stack is not None and rank.stack.device_call:
        parts.append(f"its host is blocked in {rank.stack.device_call}{at_line(next(iter(rank.stack.frames), None))}")
    return f"rank {rank.rank}: {'; '.join(parts)}" if parts else ""


def is_held_by_compute(rank: RankState) -> bool:
    """Say whether a device has started none of its open operations: then no operation blocks its stream."""
    return not any(o.started for o in rank.open_operations if o.on_device)


def with_device_health(job: JobState, finding: Finding, ranks: Iterable[int]) -> Finding:
    """Add to a finding the facts of NVML, logs and NCCL on the devices of some ranks, or why they are unknown."""
    known = job.find_device_health() if job.find_device_health is not None else {}  # dumps alone tell of no host
    hosts = {r.host: known.get(rank) for rank in ranks if known and (r := job.ranks.get(rank)) is not None}
    troubles = [text for health in hosts.values() if health is not None for text in health.troubles][:MAX_TROUBLES]
    troubles += [note.text[:160] for note in (job.log.notes("xid") if job.log is not None else ())[:1]]
    unknown = dict.fromkeys(health.reason if health is not None else NO_SAMPLES for health in hosts.values())
    reasons = [f"the health of these devices is not known: {reason}" for reason in unknown if reason]
    if not (troubles or reasons) and hosts:
        troubles = ["NVML reports no Xid and no uncorrected ECC error on the GPUs of these hosts"]
    if finding.group is not None and finding.group.is_nccl and job.log is None:
        reasons.append("what NCCL itself reports is in the output of the job only: give its log as one more path")
    return replace(finding, evidence=(*finding.evidence, *troubles), leaves_open=(*finding.leaves_open, *reasons))
