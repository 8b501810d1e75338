"""Merge the stacks of many ranks: which ranks do the same, and where the others part from them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dtprof.text_enum import TextEnum

MAIN_THREAD = "MainThread"
BUSY = 0.2
"""Share of a core above which a process counts as working."""


class PythonState(TextEnum):
    """Changes that a busy main thread made to the local variables of its frames within half a second.

    A loop that works on data changes some: what it reads, counts or collects. One that only asks whether something has
    happened changes none. What a loop without an exit counts is no progress.
    """

    CHANGED = "changed"
    UNCHANGED = "unchanged"
    ENDLESS = "endless"  # its innermost loop has no exit in the source
    UNSEEN = "unseen"  # the code has no local variables: it runs at the top level of a module
    NATIVE = "native"  # it computes in code that has let go of the interpreter


@dataclass(frozen=True, kw_only=True)
class Frame:
    """One frame of a stack; `line` is 0 in native code."""

    function: str
    file: str
    line: int

    @property
    def is_unknown(self) -> bool:
        """Whether it is native code without a name: its address differs from process to process, and says nothing."""
        return self.function.startswith("0x")


@dataclass(frozen=True, kw_only=True)
class Thread:
    """One thread of a rank; frames innermost first."""

    name: str
    frames: tuple[Frame, ...]
    is_active: bool = False
    has_gil: bool = False


@dataclass(frozen=True, kw_only=True)
class RankStack:
    """The observed stacks of one rank; `reason` says why there are no threads."""

    rank: int
    pid: int
    state: str = ""
    cpu_share: float | None = None  # of one core
    children_cpu_share: float | None = None  # of its descendants
    io_bytes: int | None = None  # read and written while it was watched
    page_faults: int | None = None  # while it was watched
    python_state: PythonState | None = None  # of one that was busy
    threads: tuple[Thread, ...] = ()
    reason: str = ""

    @property
    def main(self) -> Thread | None:
        """The main thread; the first where none is called so."""
        named = (thread for thread in self.threads if thread.name == MAIN_THREAD)
        return next(named, self.threads[0] if self.threads else None)


@dataclass(frozen=True, kw_only=True)
class StackGroup:
    """Ranks whose main threads are at the same line; `frames` innermost first.

    `shared` is how many of the outermost frames the group has in common with the largest group: 0 where it is that.
    """

    ranks: tuple[int, ...]
    frames: tuple[Frame, ...]
    shared: int = 0


def read_stacks(document: Mapping[str, Any], ranks: Mapping[int, int]) -> list[RankStack]:
    """Return the stacks of a document as `launch.stack_sampler` writes it.

    Parameters:
        document: facts by pid under `processes`; what is damaged there is skipped.
        ranks: by pid the rank, of the processes wanted.
    """
    processes = document.get("processes")
    if not isinstance(processes, dict):
        return []
    found = []
    for pid, rank in ranks.items():
        facts = processes.get(str(pid))
        if not isinstance(facts, dict):
            continue
        threads = facts.get("threads")
        found.append(
            RankStack(
                rank=rank,
                pid=pid,
                state=str(facts.get("state") or ""),
                cpu_share=_number(facts, "cpu_share"),
                children_cpu_share=_number(facts, "children_cpu_share"),
                io_bytes=_count(facts, "io_bytes"),
                page_faults=_count(facts, "page_faults"),
                python_state=next((state for state in PythonState if state == facts.get("python_state")), None),
                threads=tuple(map(_thread, threads)) if isinstance(threads, list) else (),
                reason=str(facts.get("reason") or ""),
            )
        )
    return sorted(found, key=lambda stack: (stack.rank, stack.pid))


def _number(facts: Mapping[str, Any], name: str) -> float | None:
    value = facts.get(name)
    return float(value) if isinstance(value, int | float) else None


def _count(facts: Mapping[str, Any], name: str) -> int | None:
    value = facts.get(name)
    return value if isinstance(value, int) else None


def _thread(facts: Any) -> Thread:
    facts = facts if isinstance(facts, dict) else {}
    frames = facts.get("frames")
    return Thread(
        name=str(facts.get("thread_name") or "unnamed"),
        frames=tuple(frame for frame in map(_frame, frames) if not frame.is_unknown)
        if isinstance(frames, list)
        else (),
        is_active=bool(facts.get("active")),
        has_gil=bool(facts.get("owns_gil")),
    )


def _frame(facts: Any) -> Frame:
    facts = facts if isinstance(facts, dict) else {}
    line = facts.get("line")
    return Frame(
        function=str(facts.get("name") or "?"),
        file=str(facts.get("filename") or facts.get("module") or "?"),
        line=line if isinstance(line, int) else 0,
    )


def group_stacks(stacks: Iterable[RankStack]) -> list[StackGroup]:
    """Put ranks with equal stacks of the main thread together; the fewest ranks first, who differ from the rest."""
    ranks_of: dict[tuple[Frame, ...], list[int]] = {}
    for stack in stacks:
        if stack.main is not None:
            ranks_of.setdefault(stack.main.frames, []).append(stack.rank)
    ordered = sorted(ranks_of, key=lambda frames: (len(ranks_of[frames]), ranks_of[frames]))
    if not ordered:
        return []
    largest = ordered[-1]
    return [
        StackGroup(
            ranks=tuple(ranks_of[frames]),
            frames=frames,
            shared=0 if frames is largest else _num_shared(frames, largest),
        )
        for frames in ordered
    ]


def _num_shared(a: Sequence[Frame], b: Sequence[Frame]) -> int:
    """Return how many of the outermost frames two stacks have in common."""
    count = 0
    for one, other in zip(reversed(a), reversed(b), strict=False):
        if one != other:
            break
        count += 1
    return count
