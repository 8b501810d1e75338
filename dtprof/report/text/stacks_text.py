"""Stacks of all ranks as text: equal ones once, who differs first, and from which line on."""

import re
from collections.abc import Sequence
from pathlib import Path

from dtprof.diagnosis.stack_groups import Frame, RankStack, StackGroup, group_stacks
from dtprof.formatting import join_lines, list_ranks, plural

MOST_GROUPS = 8
MOST_FRAMES = 40
MOST_CHARACTERS = 90
_TEMPLATE_ARGUMENTS = re.compile(r"<[^<>]*>")


def stacks_text(stacks: Sequence[RankStack], *, all_threads: bool, notes: Sequence[str]) -> str:
    """Return the text that `dtprof stacks` prints; frames innermost last, as in a traceback."""
    groups = group_stacks(stacks)
    lines = [_headline(stacks, groups)]
    for group in groups[:MOST_GROUPS]:
        lines += ["", f"{list_ranks(group.ranks)}{_state_of(group, stacks)}"]
        lines += _frames(group.frames, differs_from=groups[-1] if group.shared else None, shared=group.shared)
    if len(groups) > MOST_GROUPS:
        rest = [rank for group in groups[MOST_GROUPS:] for rank in group.ranks]
        lines += [
            "",
            f"{plural(len(groups) - MOST_GROUPS, 'more stack')}, of {list_ranks(sorted(rest))}: --json prints all",
        ]
    unread = [stack for stack in stacks if not stack.threads]
    if unread:
        lines += ["", *(f"rank {stack.rank} (pid {stack.pid}): no stack: {stack.reason}" for stack in unread)]
    if all_threads:
        lines += _other_threads(stacks)
    lines += ["", *notes] if notes else []
    return join_lines(lines)


def _headline(stacks: Sequence[RankStack], groups: Sequence[StackGroup]) -> str:
    read = sum(len(group.ranks) for group in groups)
    if not read:
        return f"no stack of {plural(len(stacks), 'rank')} can be read"
    if len(groups) == 1:
        return f"{list_ranks(groups[0].ranks)}: the main thread is at the same line"
    return (
        f"{plural(read, 'rank')}, {plural(len(groups), 'different stack')} of the main thread; "
        "those with the fewest ranks first"
    )


def _state_of(group: StackGroup, stacks: Sequence[RankStack]) -> str:
    members = [stack for stack in stacks if stack.rank in set(group.ranks)]
    states = sorted({stack.state for stack in members if stack.state})
    shares = [stack.cpu_share for stack in members if stack.cpu_share is not None]
    parts = [" or ".join(states)] if states else []
    if shares:
        low, high = round(100 * min(shares)), round(100 * max(shares))
        parts.append(f"{low} % of a core" if low == high else f"{low} to {high} % of a core")
    return f" ({', '.join(parts)})" if parts else ""


def _frames(frames: Sequence[Frame], *, differs_from: StackGroup | None, shared: int) -> list[str]:
    outermost_first = list(reversed(frames))
    left_out = max(0, len(outermost_first) - MOST_FRAMES)
    lines = [f"    ... {left_out} outer frames"] if left_out else []
    for number, frame in enumerate(outermost_first[left_out:], start=left_out):
        mark = ">" if differs_from is not None and number == shared else " "
        words = f"   <- other than {list_ranks(differs_from.ranks)}" if mark == ">" and differs_from else ""
        lines.append(f"  {mark} {_frame_text(frame)}{words}")
    return lines


def _frame_text(frame: Frame) -> str:
    """Return `file:line function`; native code: its function, less the arguments of templates, and its library."""
    file = frame.file.rpartition("/site-packages/")[2].removeprefix(f"{Path.cwd()}/")
    if frame.line:
        return f"{file}:{frame.line} {frame.function}"
    name = frame.function
    while (shorter := _TEMPLATE_ARGUMENTS.sub("", name)) != name:
        name = shorter
    return f"{name if len(name) <= MOST_CHARACTERS else name[:MOST_CHARACTERS] + '...'} ({Path(file).name})"


def _other_threads(stacks: Sequence[RankStack]) -> list[str]:
    lines = []
    for stack in stacks:
        for thread in stack.threads:
            if thread is not stack.main and thread.frames:
                lines += ["", f"rank {stack.rank}, thread {thread.name}{' (active)' if thread.is_active else ''}"]
                lines += _frames(thread.frames, differs_from=None, shared=0)
    return lines
