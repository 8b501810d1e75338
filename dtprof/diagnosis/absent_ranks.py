"""Activity of a rank that others wait for and that is in no operation."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from dtprof.diagnosis.blocked_ranks import places_held_by, seen_at
from dtprof.diagnosis.findings import Evidence, Finding, at_line, capitalised, wait_words
from dtprof.diagnosis.job_state import RankState
from dtprof.diagnosis.known_errors import first_words
from dtprof.diagnosis.stack_groups import PythonState
from dtprof.formatting import format_fraction
from dtprof.records import events

FROZEN = ("stopped", "disk-sleep", "tracing-stop")
"""States in which a process does nothing, whatever comes."""
LONG_PHASES = {
    events.CHECKPOINT: "Let it finish, or make the others not wait for it: save asynchronously, or raise the timeout.",
    events.EVALUATION: "Let it finish, or have all ranks evaluate a part each, so that none waits.",
    events.COMPILE: "Let it finish; a cache of compiled code that lasts (TORCHINDUCTOR_CACHE_DIR) spares the next job.",
}
"""Activities that may take long while others wait, and the advice; an evaluation where the rank works."""
DEVICE_ADVICE = (
    "Look at what its device works on: a kernel that does not end, a copy, an error of the device (nvidia-smi, dmesg)."
)
LIVING_THREAD = (
    "Look at why this rank left its loop before the others; make its helper threads daemons, or join them, so that the "
    "launcher sees its end."
)
DEAD_THREAD = "If it waits for data from the thread that raised, have that thread pass its exception on."
JOINED_BEFORE = (
    "It has joined before: a group that is made again may meet what torchrun's store still holds of the first. Join "
    "once, or pass a store with a prefix of its own each time."
)
LONG_WORK = (
    "Let it finish, or do not make the others wait: do it before training, share it among the ranks, or raise the "
    "timeout of the group."
)
OTHER_PROCESS = "It waits for another process: look at whether that lives, and what it waits for."
WAITS = (
    ("torch/distributed/rpc/", "It waits for the answer of an RPC: look at what the worker that serves it waits for."),
    ("queue.py", "It waits for a queue: look at the thread that fills it, or empties it."),
    *((file, OTHER_PROCESS) for file in ("multiprocessing/", "subprocess.py")),
    ("concurrent/futures/", "It waits for a future: look at the thread or process that is to set it."),
    ("threading.py", "It waits for another thread: look at its stack (dtprof stacks --all-threads)."),
    ("socket.py", "It waits for a connection: look at the other end."),
    ("selectors.py", "It waits for a file or connection: look at the other end."),
    ("torch/utils/data/", "It waits for its data loader: look at the workers, and what they read."),
)
"""Where a library function is defined that a rank waits in, and the advice."""
WAITS_OTHERWISE = "Look at the line it is at: input, a lock, a file, a queue."


def absent_finding(
    absent: list[RankState],
    waiting: tuple[int, ...],
    place: str,
    *,
    going_on: Mapping[int, float] = MappingProxyType({}),
) -> Finding:
    """Return the finding for ranks that others wait for in one place, by the activity of the first of them.

    Parameters:
        going_on: by rank without a stack: for how many seconds of the wait it went on recording, to the end of the job.
    """
    culprits = tuple(sorted(rank.rank for rank in absent))
    first = min(absent, key=lambda rank: rank.rank)
    absence = _what_it_does(first, goes_on=first.rank in going_on)
    kind, words = absence.kind, absence.words
    after = _thread_exception_words(first) if kind == "rank-stuck" else ""
    if len(absent) > 1:
        words = words.replace("is ", "are ", 1).replace("has ", "have ", 1).replace("does not", "do not")
    return Finding(
        kind=kind,
        severity="warning" if kind == "long-operation" else "error",
        summary=f"{capitalised(culprits)} {words}{seen_at(first)}{after}; {wait_words(waiting)}"
        f" for {'it' if len(absent) == 1 else 'them'} in {place}.",
        culprit_ranks=culprits,
        waiting_ranks=waiting,
        grade=absence.grade,
        evidence_class=absence.evidence_class,
        culprit_call_sites=places_held_by(absent),
        evidence=(
            *(f"rank {rank.rank}: {observed_words(rank)}" for rank in absent[:8]),
            *(
                f"rank {rank.rank} went on recording for {going_on[rank.rank]:.0f} s while others waited, to the end"
                for rank in absent[:8]
                if rank.rank in going_on
            ),
            *(words for rank in absent[:8] for words in _describe_thread_exceptions(rank)),
        ),
        advice=(absence.advice, *([DEAD_THREAD] if after else [])),
        is_early=all(is_working(rank) and rank.steps == 0 and bool(rank.open_phases) for rank in absent),
    )


def kind_of_absence(rank: RankState, *, goes_on: bool = False) -> str:
    """Return the kind of the finding for a rank that others wait for; `goes_on` as `absent_finding` has it."""
    return _what_it_does(rank, goes_on=goes_on).kind


class _Absence(NamedTuple):
    """What a rank does that others wait for: kind of the finding, words, advice, how sure it is and on what."""

    kind: str
    words: str
    advice: str
    grade: float
    evidence_class: Evidence | None = None


def _what_it_does(rank: RankState, *, goes_on: bool) -> _Absence:
    stack = rank.stack
    progress = progress_of(rank)
    if rank.has_left:
        words = "has ended its program, while a thread that is no daemon keeps its process alive"
        return _Absence("rank-exited", words, LIVING_THREAD, 0.9)
    if (frozen := frozen_words(rank)) and not progress:
        return _Absence("rank-frozen", f"is {frozen}", "Find out who stopped the process.", 0.95, Evidence.DIRECT)
    if rank.in_init:
        advice = JOINED_BEFORE if rank.groups else "Look at what the other members of its group passed to it."
        return _Absence("rank-never-joined", "has not come out of init_process_group", advice, 0.7)
    for phase, advice in LONG_PHASES.items():
        if phase in rank.open_phases and (phase != events.EVALUATION or is_working(rank) or goes_on):
            return _Absence("long-operation", f"is in a long {phase}", advice, 0.8)
    if stack is not None and stack.device_call:
        words = f"is blocked in {stack.device_call}: it waits for its own device, which does not get on,"
        return _Absence("rank-stuck", words, DEVICE_ADVICE, 0.9, Evidence.DIRECT)
    if progress or goes_on:
        seen = goes_on or (stack is not None and bool(stack.frames))  # without a stack it may be a loop that has no end
        words = "is still at work outside any collective"
        return _Absence("long-operation", words, LONG_WORK, 0.8 if seen else 0.5)
    if stack is not None and stack.python_state == PythonState.ENDLESS:
        words = "is in a loop without an exit, outside any collective,"
        advice = "Give the loop at this line a condition that it can meet, or a time limit."
        return _Absence("rank-stuck", words, advice, 0.9, Evidence.DIRECT)
    if is_working(rank):
        return _Absence(
            "rank-stuck",
            "is busy outside any collective and does not come",
            "Look at the line it runs: nothing there changes, as in a loop that waits or has no end.",
            0.75,
            Evidence.BUSY,
        )
    seen = rank.interruption is not None or (stack is not None and bool(stack.frames))
    called = stack.library_call if stack is not None else ""
    return _Absence(
        "rank-stuck",
        "is stuck outside any collective",
        next((advice for file, advice in WAITS if file in called), WAITS_OTHERWISE),
        0.9 if seen else 0.6,
        Evidence.DIRECT if seen else None,
    )


def _thread_exception_words(rank: RankState) -> str:
    """Return that a thread of a rank had raised before, with the newest exception; empty where none has."""
    if not rank.thread_exceptions:
        return ""
    error = rank.thread_exceptions[-1]
    return f", after its thread raised {error.type}{at_line(error.frame)}"


def _describe_thread_exceptions(rank: RankState) -> list[str]:
    return [
        f"rank {rank.rank}: thread {error.thread or 'of no name'} ended by {error.type}: "
        f"{first_words(error.message)}{at_line(error.frame)}"
        for error in rank.thread_exceptions[-2:]
    ]


def is_working(rank: RankState) -> bool:
    """Say whether its process was seen busy."""
    return rank.stack is not None and rank.stack.is_busy


def progress_of(rank: RankState) -> tuple[str, ...]:
    """Return the evidence that a rank makes progress: empty where there is none.

    A host that waits for its device may spin in the driver: where there is one, native code alone shows nothing.
    """
    stack = rank.stack
    if stack is None or stack.state in ("stopped", "tracing-stop"):
        return ()
    on_device = bool(stack.device_call) or any(operation.on_device for operation in rank.open_operations)
    is_all_native = stack.python_state == PythonState.NATIVE and len(stack.progress) == 1
    return () if on_device and is_all_native else stack.progress


def observed_words(rank: RankState) -> str:
    """Return the evidence from a rank's stack, its interruption or its last record."""
    stack = rank.stack
    phases = f" in phase {rank.open_phases[-1]}" if rank.open_phases else ""
    if stack is None and rank.interruption is not None:
        return f"Ctrl-C (SIGINT) found it{at_line(rank.interruption.frame) or ' at an unknown line'}{phases}"
    if stack is None:
        return f"no stack was taken; its last record is{at_line(rank.last_site) or ' at an unknown line'}{phases}"
    progress = "".join(f", {words}" for words in progress_of(rank))
    if not stack.frames:
        return f"process state {stack.state}{progress}{phases}; {stack.reason}"
    path = " < ".join(f"{frame.function} ({frame.file}:{frame.line})" for frame in stack.frames[:4])
    path = f"{stack.library_call} < {path}" if stack.library_call else path
    share = "" if stack.cpu_share is None else f", {format_fraction(stack.cpu_share, 0)} of a core"
    return f"process state {stack.state}{share}{progress}{phases}; stack: {path}"


def frozen_words(rank: RankState) -> str:
    """Return `frozen (process state stopped)`, empty where the process is not."""
    stack = rank.stack
    return f"frozen (process state {stack.state})" if stack is not None and stack.state in FROZEN else ""
