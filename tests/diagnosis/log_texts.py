"""Log texts in the style of torch's versions, launchers and carriers, written for these tests."""

from collections.abc import Callable

from dtprof.diagnosis.findings import Verdict

Diagnose = Callable[..., Verdict]
"""The fixture `diagnose_texts`: from the contents of log files to the verdict."""

NEWER_WATCHDOG = (
    "[rank{rank}]:[E1121 10:00:0{rank}.000000001 ProcessGroupNCCL.cpp:{line}] [Rank {rank}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum={seq}, OpType={op}, NumelIn={numel}, NumelOut={numel}, Timeout(ms)=600000) "
    "ran for 600042 milliseconds before timing out."
)
OLDER_WATCHDOG = (
    "[E ProcessGroupNCCL.cpp:{line}] [Rank {rank}] Watchdog caught collective operation timeout: "
    "WorkNCCL(SeqNum={seq}, OpType={op}, Timeout(ms)=1800000) ran for 1800100 milliseconds before timing out."
)
STATUS_23 = "[rank{rank}]:[E ProcessGroupNCCL.cpp:1537] [PG {pg} Rank {rank}] Timeout at NCCL work: {seq}, " + (
    "last enqueued NCCL work: {enqueued}, last completed NCCL work: {done}."
)
STATUS_24 = (
    "[rank{rank}]:[E1121 10:00:01.000000002 ProcessGroupNCCL.cpp:1664] [PG 0 (default_pg) Rank {rank}] Exception "
    "(either an error or timeout) detected by watchdog at work: {seq}, last enqueued NCCL work: {enqueued}, "
    "last completed NCCL work: {done}."
)
STATUS_26 = (
    "[rank{rank}]:[E1121 10:00:01.000000002 ProcessGroupNCCL.cpp:2168] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  "
    "failure detected by watchdog at work sequence id: {seq} PG status: last enqueued work: {enqueued}, "
    "last completed work: {done}"
)
DUMP = (
    "[rank{rank}]:[E1121 10:00:02.000000003 ProcessGroupNCCL.cpp:1429] [PG ID 0 PG GUID 0(default_pg) Rank {rank}] "
    "Received a dump signal due to a collective timeout from  rank {first} and we will try our best to dump the debug "
    "info. Last enqueued NCCL work: {enqueued}, last completed NCCL work: {done}."
)


def watchdog(rank: int, *, seq: int = 40, op: str = "ALLREDUCE", numel: int = 1024, line: int = 629) -> str:
    """Return a watchdog's line as torch prints it from 2.4 on."""
    return NEWER_WATCHDOG.format(rank=rank, seq=seq, op=op, numel=numel, line=line)


def older_watchdog(rank: int, *, seq: int = 40, op: str = "BROADCAST", line: int = 737) -> str:
    """Return a watchdog's line as torch 1.11 to 1.13 print it: no rank in front, no sizes."""
    return OLDER_WATCHDOG.format(rank=rank, seq=seq, op=op, line=line)


def status(form: str, rank: int, *, seq: int = 40, enqueued: int = 40, done: int = 39, pg: str = "0") -> str:
    """Return the line that tells how far a group of a rank had come."""
    return form.format(rank=rank, seq=seq, enqueued=enqueued, done=done, pg=pg, first=0)


def fingerprint(rank: int, *, seq: int = 5, op: str = "ALLREDUCE", shape: str = "10", dtype: str = "Float") -> str:
    """Return one side of a mismatch, as TORCH_DISTRIBUTED_DEBUG=DETAIL prints it."""
    return (
        f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber={seq}, OpType={op}, "
        f"TensorShape=[{shape}], TensorDtypes={dtype}, TensorDeviceTypes=TensorOptions(dtype=float (default), "
        "device=cpu, layout=Strided (default), requires_grad=false (default)))"
    )


def mismatch(mine: str, other: str) -> str:
    """Return the exception of a mismatch."""
    return f"RuntimeError: Detected mismatch between collectives on ranks. {mine}, but {other}."


def traceback(
    error: str, *, line: int, source: str, function: str = "main", call: str | None = None, prefix: str = ""
) -> str:
    """Return a traceback through user code, and torch's frames where a call is named."""
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/me/job/train.py", line 200, in <module>',
        "    main()",
        f'  File "/home/me/job/train.py", line {line}, in {function}',
        f"    {source}",
    ]
    if call:
        torch = "/usr/lib/python3.11/site-packages/torch/distributed"
        lines += [
            f'  File "{torch}/c10d_logger.py", line 83, in wrapper',
            "    return func(*args, **kwargs)",
            "           ^^^^^^^^^^^^^^^^^^^^^",
            f'  File "{torch}/distributed_c10d.py", line 2810, in {call}',
            "    work.wait()",
        ]
    return "\n".join(prefix + one for one in [*lines, error])


GLOO_LATE = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:81] "
    "Timed out waiting 30000ms for recv operation to complete"
)
GLOO_LOST = (
    "RuntimeError: [../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.7]:43112"
)


def table(exits: dict[int, int], *, first: int, host: str = "node1") -> str:
    """Return torchelastic's table of failures; the root cause is the first exit seen."""
    names = {-15: "SIGTERM", -9: "SIGKILL", -6: "SIGABRT", -11: "SIGSEGV"}

    def entry(number: int, rank: int) -> str:
        status, pid = exits[rank], 4000 + rank
        signal = f" ({names[status]})" if status in names else ""
        told = f"Signal {-status} ({names[status]}) received by PID {pid}" if status in names else "To enable traceback"
        return (
            f"[{number}]:\n  time      : 2026-11-21_10:00:0{rank}\n  host      : {host}\n"
            f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {status} (pid: {pid}) {signal}\n"
            f"  error_file: <N/A>\n  traceback : {told}"
        )

    others = [entry(i + 1, rank) for i, rank in enumerate(rank for rank in exits if rank != first)]
    return "\n".join(
        [
            "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
            "=" * 60,
            "train.py FAILED",
            "-" * 60,
            "Failures:",
            *(others or ["  <NO_OTHER_FAILURES>"]),
            "-" * 60,
            "Root Cause (first observed failure):",
            entry(0, first),
            "=" * 60,
        ]
    )


def in_broadcast(ways: dict[int, str], lines: dict[int, int], *, source: str = "dist.broadcast(w, src=src)") -> str:
    """Return the log of ranks that waited in a broadcast, and of others that did in an all_reduce at these lines."""
    parts = [
        traceback(GLOO_LATE.replace("recv", way), line=30, source=source, call="broadcast", prefix=f"[rank{rank}]: ")
        for rank, way in ways.items()
    ]
    parts += [
        traceback(GLOO_LATE, line=line, source="dist.all_reduce(g)", call="all_reduce", prefix=f"[rank{rank}]: ")
        for rank, line in lines.items()
    ]
    return "\n".join([*parts, table(dict.fromkeys([*ways, *lines], 1), first=0)])
