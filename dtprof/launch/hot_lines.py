"""Find the lines at which a rank spends its time in Python of its own, between the parts of a step that torch runs."""

import re

from dtprof.launch.stack_profiles import Frame, Profile, ProfiledLine, find_innermost
from dtprof.records.user_files import is_user_file

MIN_SHARE = 0.1
"""Of the samples of the rank, at a line."""
FEWEST_SAMPLES = 100
MOST_OF_CALLER = 0.5
"""Share of a line's time from which on a line that it calls is the one to name."""
_RUN_BY_TORCH = re.compile(
    r"/torch/(_dynamo|_functorch|_inductor|autograd|distributed|fx|nn|optim|serialization)\b|/torch/_tensor\.py$"
)
"""Frames of forward and backward passes, compilation, optimizers, communication and checkpoints."""
_Stack = tuple[list[Frame], tuple[Frame, ...], int]
"""The lines of the program in a stack, the stack, outermost frame first, and its samples."""


def find_hot_lines(profile: Profile) -> list[ProfiledLine]:
    """Return the lines with most of the time outside of what torch runs, the costliest first.

    Of a line and the lines that it calls the deepest that holds most of the caller's time is named: the call in the
    training loop where a function spreads its time, the line in the function where it does not.
    """
    if profile.samples < FEWEST_SAMPLES:
        return []
    stacks = [
        (_user_lines(stack), stack, count)
        for stack, count in profile.stacks.items()
        if not any(_RUN_BY_TORCH.search(frame.file) for frame in stack)
    ]
    return sorted(_descend(stacks, 0, profile.samples), key=lambda line: line.share, reverse=True)


def _descend(stacks: list[_Stack], depth: int, samples: int) -> list[ProfiledLine]:
    """Return the lines to name of stacks that agree in their `depth` outermost lines of the program."""
    called: dict[Frame, list[_Stack]] = {}
    for stack in stacks:
        if depth < len(stack[0]):
            called.setdefault(stack[0][depth], []).append(stack)
    largest = max(map(_count, called.values()), default=0)
    if depth and largest < MOST_OF_CALLER * _count(stacks):
        lines, frames, _ = max(stacks, key=lambda stack: stack[2])
        frame, share = lines[depth - 1], round(_count(stacks) / samples, 3)
        return [ProfiledLine(frame=frame, share=share, innermost=find_innermost(frames[frames.index(frame) :]))]
    return [
        line
        for each in called.values()
        if _count(each) >= MIN_SHARE * samples
        for line in _descend(each, depth + 1, samples)
    ]


def _count(stacks: list[_Stack]) -> int:
    return sum(count for _, _, count in stacks)


def _user_lines(stack: tuple[Frame, ...]) -> list[Frame]:
    """Return the frames of the program; a comprehension stands on the line of its function."""
    lines: list[Frame] = []
    for frame in stack:
        if is_user_file(frame.file) and (not lines or lines[-1][:2] != frame[:2]):
            lines.append(frame)
    return lines
