"""The sentences of torch, NCCL, gloo, launchers and schedulers that tell of hangs and ends, torch 1.11 to 2.13."""

import re

from dtprof.diagnosis.known_errors import NCCL_RESOURCES
from dtprof.diagnosis.sources.logs.line_prefixes import LogLine, rank_before
from dtprof.diagnosis.sources.logs.log_facts import (
    SIGNALS,
    TENSOR,
    UNNAMED_EXIT,
    Exit,
    Facts,
    Fingerprint,
    LoggedProgress,
    Note,
    Order,
    Timeout,
)
from dtprof.job.axes import DEFAULT_GROUP

MAX_TEXT = 400
MAX_RANKS = 100_000

# A line without any of these, and far from one that has them, says nothing to the rules: it is skipped unread.
WORDS = (
    *("atchdog", "NCCL", "Heartbeat", "monitoredBarrier", "gloo", "exitcode", "exits with return code", "ignal"),
    *("Killed", "oom", "OOM", "srun:", "slurmstepd", "local_rank", "Traceback", 'File "', "Error", "Exception", "NVRM"),
    *("trace cache", "worker group", "Setting OMP_NUM", "terminate called", "Segmentation fault", "across cluster"),
    *("world_size", "Starting elastic", "CANCELLED", "Fatal", "FingerPrint", "FullMesh", "mpirun", "MPI_ABORT"),
    *(
        "Child process with PID",
        "params[",
        "emory limit",
        "MEMLIMIT",
        "job killed: ",
        "hard limit",
        "sending SIG",
        "running low on memory",
        "emory pressure",
        "worker died or was killed",
        "worker process has died",
        "issing ranks: ",
        "stall_inspector",
    ),
)
BYTE_WORDS = tuple(word.encode() for word in WORDS)

WORK = re.compile(
    # NCCL's, HCCL's (Ascend), XCCL's (Intel); before torch 1.12 without a number. A terminal that wraps lines leaves no
    # space where it broke one at a space.
    r"Work[A-Z]CCL\((?:SeqNum=(\d{1,20}), ?)?OpType=(\w+)"
    r"(?:, ?NumelIn=(\d{1,20}), ?NumelOut=(\d{1,20}))?, ?Timeout\(ms\)=(\d{1,20})\)"
    r"(?: ?ran ?for ?(\d{1,20}) ?milliseconds ?before ?timing ?out| ?timed ?out ?in ?blocking ?wait)"
)
OF_RANK = re.compile(r"\[Rank (\d{1,7})\] Watchdog caught")
GROUP = re.compile(r"\[PG (?:ID \S{1,30} PG GUID )?([^\s()\]]{1,80})\s?(?:\(([^)]{0,200})\))? Rank (\d{1,7})\]")
WORKED = re.compile(r"(?:at NCCL work|by watchdog at work(?: sequence id)?): (\d{1,20})")
ENQUEUED = re.compile(r"[Ll]ast ?enqueued ?(?:NCCL ?)?work: ?(-?\d{1,20})")
COMPLETED = re.compile(r"last ?completed ?(?:NCCL ?)?work: ?(-?\d{1,20})")
PRINT = re.compile(
    r"Rank (\d{1,7}) is running (inconsistent )?collective: CollectiveFingerPrint\("
    r"(?:SequenceNumber=(\d{1,20}),? ?)?OpType=(\w+)(?:, ?TensorShape=\[([^\]]{0,300})\])?"
    r"(?:, ?TensorDtypes=([\w, ]{0,200}?), ?TensorDeviceTypes)?"
)
EXITED = re.compile(r"failed \(exitcode: (-?\d{1,5})\) local_rank: (\d{1,6}) \(pid: (\d{1,10})\)")
LAST_COMMAND = re.compile(
    r"--local_rank=(\d{1,6}).{0,4000}(?:exits with return code = (-?\d{1,5})"
    r"|returned non-zero exit status (\d{1,3})|died with <Signals\.\w+: (\d{1,3})>)"
)
"""The launchers of DeepSpeed, and of torch before 1.9, print the command of their last process, whichever failed."""
SPAWN_EXIT = re.compile(r"process (\d{1,6}) terminated with (?:signal (SIG\w+)|exit code (-?\d{1,5}))")
SRUN = re.compile(
    r"srun: error: \S{1,200}: tasks? ([\d,-]{1,400}): (Killed|Out Of Memory"
    r"|Terminated|Segmentation fault|Aborted|Bus error|Exited with exit code (\d{1,3}))"
)
LIGHTNING_EXIT = re.compile(r"\[rank: (\d{1,7})\] Child process with PID \d+ terminated with code (-?\d{1,5})")
MPI_FIRST = re.compile(r"Process name: \[\[\d+,\d+\],(\d{1,7})\]")
MPI_ABORTED = re.compile(r"MPI_ABORT was invoked on rank (\d{1,7}) in communicator")
MPI_EXIT = re.compile(r"process rank (\d{1,7}) with PID \d+ on node \S{1,200} exited on signal (\d{1,3})")
SRUN_STATUS = {
    "Killed": -9,
    "Out Of Memory": -9,
    "Terminated": -15,
    "Segmentation fault": -11,
    "Aborted": -6,
    "Bus error": -7,
}

EXITING = ("xit", "died with", "terminated with", "srun: error", "Process name: ", "MPI_ABORT")

# kind of note: how it is said. A group named `rank` is the rank it is about; `ranks` others; `number` a count.
NOTES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("stuck", re.compile(r"watchdog got stuck for (?P<number>\d{1,9}) seconds")),
    ("heartbeat", re.compile(r"Heartbeat monitor timed out")),
    ("device-error", re.compile(r"atchdog thread terminated with exception: (?:CUDA|HIP) error: .{0,120}")),
    ("barrier-missed", re.compile(r"Ranks? (?P<ranks>\d[\d, ]{0,4000}) failed to pass monitoredBarrier")),
    ("barrier-waits", re.compile(r"timed out in monitoredBarrier waiting for rank (?P<ranks>\d{1,7})")),
    ("barrier-reached", re.compile(r"Rank (?P<rank>\d{1,7}) successfully reached monitoredBarrier")),
    ("size-conflict", re.compile(r"op\.preamble\.length <= op\.nbytes\. \d{1,20} vs \d{1,20}")),
    ("gloo-timeout", re.compile(r"Timed out waiting \d{1,12}ms for (?:send|recv) operation")),
    (
        "peer-lost",
        re.compile(
            r"Connection closed by (?:remote )?peer|Read error .{0,80}Connection reset by peer"
            r"|Application timeout caused pair closure"
        ),
    ),
    ("store-key", re.compile(r"wait timeout after \d{1,12}ms, keys: .{1,200}")),
    (
        "store-barrier",
        re.compile(
            r"store based barrier on rank: (?P<rank>\d{1,7}), for key: \S{1,80} "
            r"\(world_size=(?P<number>\d{1,7}), worker_count=(?P<ranks>\d{1,7})"
        ),
    ),
    ("store-clients", re.compile(r"waiting for clients\. (?P<ranks>\d{1,7})/(?P<number>\d{1,7}) clients joined")),
    (
        "store-unreachable",
        re.compile(r"client socket has timed out after"),
    ),
    ("rendezvous", re.compile(r"RendezvousTimeoutError|RendezvousConnectionError")),
    ("nccl-id", re.compile(r"retrieving ncclUniqueId from \[(?P<ranks>\d{1,7})\] via c10d key-value store.{0,120}")),
    (
        "transport",
        re.compile(
            r"NET/IB : Got completion from peer .{0,200}|ibv_\w+ failed.{0,100}"
            r"|NET/\w{1,20} Request \S{1,40} completed with error.{0,160}"
        ),
    ),
    (
        "lost-socket",
        re.compile(
            r"Call to (?:recv|send|connect)\w{0,10} .{0,120}failed : .{0,80}|Connection closed by remote peer \S{1,120}"
        ),
    ),
    (
        "unreachable",
        re.compile(
            r"socketStartConnect: .{0,160}|socketPollConnect.{0,160}|Connect to \S{1,120} failed : .{0,80}"
            r"|connect\w* returned (?:Connection|No route|Network).{0,80}"
        ),
    ),
    ("cuda-failure", re.compile(r"Cuda failure .{0,160}")),
    ("port-taken", re.compile(r"failed to (?:listen|bind) .{0,160}(?:EADDRINUSE|[Aa]ddress already in use).{0,80}")),
    (
        "other-count",
        re.compile(
            r"same model across all ranks, but Rank (?P<rank>\d{1,7}) has (?P<number>\d{1,9}) params, "
            r"while rank (?P<ranks>\d{1,7}) has inconsistent (?!0 )\d{1,9} params"
        ),
    ),
    (
        "other-shape",
        re.compile(
            r"\[(?P<rank>\d{1,7})\]: params\[(?P<number>\d{1,9})\] in this process with (?:sizes|strides) "
            r"\[[\d, ]{0,200}\] appears not to match (?:sizes|strides) of the same param in process (?P<ranks>\d{1,7})"
        ),
    ),
    ("other-step", re.compile(r"Rank (?P<rank>\d{1,7}) has different values for step: .{0,80}")),
    ("no-mesh", re.compile(r"connectFullMesh failed.{0,200}")),
    ("remote-error", re.compile(r"ncclRemoteError|remote process exited or there was a network error")),
    ("system-error", re.compile(r"ncclSystemError.{0,160}|ncclInternalError.{0,160}|ncclUnhandledCudaError.{0,160}")),
    ("nccl-refused", re.compile(rf"(?:{'|'.join(re.escape(words) for words, _ in NCCL_RESOURCES)}).{{0,160}}")),
    ("duplicate-gpu", re.compile(r"Duplicate GPU detected.{0,120}|Multiple Ranks are using the same GPU.{0,120}")),
    ("stalled-tensor", re.compile(rf"^(?P<ranks>\d{{1,7}}): \[(?={TENSOR})")),
    ("stalled-tensor", re.compile(rf"(?:^|[\s:]){TENSOR}\S{{0,200}} \[missing ranks: ?(?P<ranks>[\d, ]{{1,4000}})\]")),
    ("rank-taken", re.compile(r"Bootstrap Root : rank (?P<rank>\d{1,7}) of \d{1,7} ranks has already checked in")),
    ("nccl-mismatch", re.compile(r"Mismatched collective detected.{0,80}around rank (?P<ranks>\d{1,7})")),
    ("nccl-sizes", re.compile(r"[Cc]ollective mismatch error.{0,160}")),
    ("trace-cache", re.compile(r"Invalidate trace cache @ step.{0,120}")),
    (
        "dump-signal",
        re.compile(
            r"Received a dump signal due to a collective timeout"
            r"|dump signal due to a collective timeout from\s+rank \d{1,7}"
        ),
    ),
    (
        "oom-kill",
        re.compile(
            r"\boom-kill:constraint|OOMKilled|Out of memory: Kill(?:ed)? process|killed by the (?:cgroup )?OOM"
            r"|Detected [1-9]\d* oom[-_]kill|OOM[- ]Killed|\boom_reaper"
            # Slurm before 20, LSF, PBS, Grid Engine, HTCondor; systemd-oomd and earlyoom; Ray.
            r"|exceeded (?:job )?memory limit.{0,40}being killed|Exceeded job memory limit|TERM_MEMLIMIT"
            r"|job killed: p?v?mem \d+\w+ exceeded|exceeds job hard limit \"[hs]_(?:vmem|rss|data)\""
            r"|gone over memory limit of|systemd-oomd.{0,20}: Killed .{0,200}due to memory"
            r"|sending SIG(?:TERM|KILL) to process \d+ uid"
            r"|killed due to (?:the node running low on memory|memory pressure)",
            re.IGNORECASE,
        ),
    ),
    (
        "actor-died",
        re.compile(
            r"A worker died or was killed while executing a task.{0,600}?Worker PID: (?P<number>\d{1,10})"
            r"|The actor is dead because its worker process has died"
        ),
    ),
    ("xid", re.compile(r"NVRM: Xid.{0,160}")),
    ("native-crash", re.compile(r"Segmentation fault|HW Exception by GPU|Fatal Python error: .{0,80}")),
    ("signal-received", re.compile(r"[Ss]ignal (?P<number>\d{1,2}) \(SIG\w{1,10}\) received by PID \d{1,10}")),
    ("ended-thread", re.compile(r"terminate called without an active exception")),
    (
        "stopped",
        re.compile(
            r"Received (?P<number>\d{1,3}) death signal, shutting down workers|got signal: (?P<ranks>1|2|15)\b"
            r"|\*\*\* (?:JOB|STEP) .{0,120}CANCELLED AT.{0,100}"
        ),
    ),
    ("dump-observed", re.compile(r"Observed flight recorder dump signal from another rank")),
    ("folded", re.compile(r"\[repeated \d+x across cluster\]")),
    ("failed", re.compile(r"ChildFailedError|Root Cause \(first observed failure\)")),
)
WORLD = re.compile(r"\bworld_size[\"']?\s?[=:]\s?(\d{1,6})\b")
NEW_ATTEMPT = re.compile(r"attempts left; will restart worker group|[Rr]estarting worker group")
NEW_JOB = re.compile(r"Setting OMP_NUM_THREADS environment variable for each process|Starting elastic_operator")


def read_sentences(line: LogLine, order: Order, facts: Facts) -> None:
    """Add the facts of the sentences of a line."""
    text = line.text
    rank = line.rank
    if "CCL(" in text:
        _read_timeouts(line, order, facts)
    if "work" in text and "[PG " in text:
        _read_progress(line, facts)
    if "CollectiveFingerPrint(" in text:
        _read_fingerprints(line, order, facts)
    if any(words in text for words in EXITING):
        _read_exits(text, order, facts)
    for kind, pattern in NOTES:
        if match := pattern.search(text):
            _read_note(kind, match, text, rank, order, facts)
    if "world_size" in text and (world := WORLD.search(text)):
        facts.declare_size(int(world[1]))


def _read_timeouts(line: LogLine, order: Order, facts: Facts) -> None:
    for match in WORK.finditer(line.text):
        named = [int(n) for n in OF_RANK.findall(line.text[: match.start()])]
        group = _group(line.text)
        group_rank = named[-1] if named else (group[2] if group else None)
        rank = _rank_at(line, match.start())
        facts.add(
            Timeout(
                order=order,
                rank=rank if rank is not None else group_rank,
                seq=int(match[1]) if match[1] else None,
                op=match[2],
                group_rank=group_rank,
                numel_in=int(match[3]) if match[3] else None,
                numel_out=int(match[4]) if match[4] else None,
                limit_ms=int(match[5]),
                ran_ms=int(match[6] or match[5]),
                stream=line.stream,
                rank_in_group=rank is None,
            )
        )


def _rank_at(line: LogLine, position: int) -> int | None:
    """Return the global rank a sentence is about: that of the nearest carrier in front of it."""
    nearest = rank_before(line.text, position)
    return nearest if nearest is not None else line.rank


def _group(text: str) -> tuple[str, str, int] | None:
    match = GROUP.search(text)
    return (match[1], match[2] or "", int(match[3])) if match else None


def _read_progress(line: LogLine, facts: Facts) -> None:
    group, worked = _group(line.text), WORKED.search(line.text)
    enqueued, completed = ENQUEUED.search(line.text), COMPLETED.search(line.text)
    if group is None or (worked is None and enqueued is None):
        return
    done = int(completed[1]) if completed else None
    most = max(int(match[1]) for match in (worked, enqueued) if match)
    rank = _rank_at(line, len(line.text))
    facts.add(
        LoggedProgress(
            rank=rank,
            group=group[0],
            description=group[1],
            group_rank=group[2],
            work=int(worked[1]) if worked else None,
            enqueued=int(enqueued[1]) if enqueued else None,
            # torch 2.3 prints memory that was never set where nothing was completed.
            completed=done if done is None or done <= most else None,
        )
    )


def _read_fingerprints(line: LogLine, order: Order, facts: Facts) -> None:
    match = list(PRINT.finditer(line.text))
    for i, groups in enumerate(match):
        facts.add(
            Fingerprint(
                order=order,
                rank=int(groups[1]),
                seq=int(groups[3]) if groups[3] else None,
                op=groups[4],
                shape=groups[5],
                dtype=groups[6],
                reported_by=int(match[0][1]) if i == 0 or not groups[2] else None,
            )
        )


def _read_exits(text: str, order: Order, facts: Facts) -> None:
    if match := EXITED.search(text):
        local = int(match[2])
        facts.local_exits[local] = Exit(rank=local, local_rank=local, status=int(match[1]), pid=int(match[3]))
    if match := LAST_COMMAND.search(text):
        status = -int(match[4]) if match[4] else int(match[2] or match[3])
        if (last := int(match[1])) == 0:
            facts.local_exits[0] = Exit(rank=0, status=status)
        else:
            facts.last_local_rank = max(facts.last_local_rank, last)
            facts.add(Note(order=order, rank=None, kind=UNNAMED_EXIT, text=match[0][-MAX_TEXT:], number=status))
    if match := SPAWN_EXIT.search(text):
        status = -SIGNALS.get(match[2], 0) if match[2] else int(match[3])
        facts.local_exits[int(match[1])] = Exit(rank=int(match[1]), status=status)
    if match := LIGHTNING_EXIT.search(text):
        facts.exits[int(match[1])] = Exit(rank=int(match[1]), status=int(match[2]))
    if match := MPI_FIRST.search(text) or MPI_ABORTED.search(text):
        facts.exits.setdefault(int(match[1]), Exit(rank=int(match[1]), status=1))
    if match := MPI_EXIT.search(text):
        facts.exits[int(match[1])] = Exit(rank=int(match[1]), status=-int(match[2]))
    if match := SRUN.search(text):
        status = SRUN_STATUS.get(match[2], int(match[3] or 1))
        for task in numbers(match[1]):
            end = Exit(rank=task, status=status, out_of_memory=match[2] == "Out Of Memory")
            facts.local_exits.setdefault(task, end)


def _read_note(kind: str, match: re.Match[str], text: str, rank: int | None, order: Order, facts: Facts) -> None:
    named = match.groupdict()
    if named.get("rank"):
        rank = int(named["rank"])
    elif rank is None:
        group = _group(text)
        rank = rank_before(text, match.start())
        if rank is None and group is not None and group[1] == DEFAULT_GROUP:
            rank = group[2]
    facts.add(
        Note(
            order=order,
            rank=rank,
            kind=kind,
            text=text.strip()[:MAX_TEXT],
            ranks=numbers(named.get("ranks") or ""),
            number=int(named.get("number") or 0),
        )
    )


def numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `0,2-4`; ranges that make it longer than any job are left out."""
    result: set[int] = set()
    for first, last in re.findall(r"(?<![\d-])(\d{1,7})(?:-(\d{1,7}))?(?![\d-])", text):
        span = range(int(first), int(last or first) + 1)
        if len(result) + len(span) <= MAX_RANKS:
            result.update(span)
    return tuple(sorted(result))
