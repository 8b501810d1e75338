"""Find the lines at which a rank spends its time in Python of its own, between the parts of a step that torch runs."""

import re
from collections import Counter
from dataclasses import dataclass

from dtprof.launch.stack_profiles import Frame, Profile, find_innermost
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


@dataclass(frozen=True, kw_only=True)
class HotLine:
    """A line of the program, its share of the rank's time, and the frame that tells what it does."""

    frame: Frame
    share: float
    innermost: Frame


def find_hot_lines(profile: Profile) -> list[HotLine]:
    """Return the lines with most of the time outside of what torch runs, the costliest first.

    Of a line and the lines that it calls the deepest that holds most of the caller's time is named: the call in the
    training loop where a function spreads its time, the line in the function where it does not.
    """
    if profile.samples < FEWEST_SAMPLES:
        return []
    own: Counter[tuple[Frame, ...]] = Counter()
    for stack, count in profile.stacks.items():
        if not any(_RUN_BY_TORCH.search(frame.file) for frame in stack):
            own[stack] += count
    lines = _descend(own, 0, profile.samples)
    return sorted(lines, key=lambda line: line.share, reverse=True)


def _descend(stacks: Counter[tuple[Frame, ...]], depth: int, samples: int) -> list[HotLine]:
    """Return the lines to name of stacks that agree in their `depth` outermost frames of the program."""
    called: dict[Frame, Counter[tuple[Frame, ...]]] = {}
    for stack, count in stacks.items():
        lines = _user_lines(stack)
        if depth < len(lines):
            called.setdefault(lines[depth], Counter())[stack] = count
    largest = max(map(Counter.total, called.values()), default=0)
    if depth and largest < MOST_OF_CALLER * stacks.total():
        return [_name(stacks, depth, samples)]
    return [
        line
        for each in called.values()
        if each.total() >= MIN_SHARE * samples
        for line in _descend(each, depth + 1, samples)
    ]


def _user_lines(stack: tuple[Frame, ...]) -> list[Frame]:
    """Return the frames of the program; a comprehension stands on the line of its function."""
    lines: list[Frame] = []
    for frame in stack:
        if is_user_file(frame.file) and (not lines or lines[-1][:2] != frame[:2]):
            lines.append(frame)
    return lines


def _name(stacks: Counter[tuple[Frame, ...]], depth: int, samples: int) -> HotLine:
    stack = max(stacks, key=stacks.__getitem__)
    frame = _user_lines(stack)[depth - 1]
    return HotLine(
        frame=frame,
        share=round(stacks.total() / samples, 3),
        innermost=find_innermost(stack[stack.index(frame) :]),
    )
