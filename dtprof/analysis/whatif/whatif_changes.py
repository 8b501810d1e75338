"""Changes that a prediction supports: how each is typed, what it is in words, and who can make it.

What a change does to a replay is in `fixes.py`, `bucket_sizes.py` and `schedule_fixes.py`. The command reads this table
for its help, so that nothing heavy is imported here.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dtprof.errors import UsageError
from dtprof.formatting import format_bytes
from dtprof.records import events
from dtprof.typed_quantities import parse_whole, plain_number, size_bytes

RANK, HOST, STAGE, OP, PHASE = "rank", "host", "stage", "op", "phase"
NETWORK, COMPUTE, OVERLAP, SYNC, WITHOUT, MICROBATCHES, SCHEDULE, SPLIT, BUCKETS, REDUCE_DTYPE, RANKS = (
    "network",
    "compute",
    "overlap",
    "sync",
    "without",
    "microbatches",
    "schedule",
    "split",
    "buckets",
    "reduce-dtype",
    "ranks",
)
OFF_THE_PATH = {
    events.DATA: ("input always ready in time", "input is loaded in the background, and always ready in time"),
    events.CHECKPOINT: ("checkpoints written in the background", "checkpoints are written in the background"),
    events.GARBAGE_COLLECTION: (
        "garbage collected outside the steps (gc.freeze(), gc.disable())",
        "garbage is collected between steps, and so rarely that it takes no time",
    ),
}
"""Phases that a program can take off the critical path: fixed, they take no time. In words, with what that assumes."""
FULL, LAST, EVEN, BARRIER = "full", "last", "even", "barrier"
HALF_WIDTH = ("bf16", "fp16")
"""Element types that gradients of 32 bits may be reduced in: FSDP's `reduce_dtype`, a communication hook of DDP."""
GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV, DUALPIPEV = "gpipe", "1f1b", "interleaved", "zb-h1", "zbv", "dualpipev"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV, DUALPIPEV)
_ALIASES = {"interleaved1f1b": INTERLEAVED, "zero-bubble": ZB_H1, "zerobubble": ZB_H1, "zbvzerobubble": ZBV}
MAX_NUMBER = 1 << 20
MAX_FACTOR = 1000.0


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One change: its subject and its value, as typed."""

    what: str
    value: str

    def __str__(self) -> str:
        """Return it as results name it."""
        return f"{self.what}={self.value}"

    @property
    def number(self) -> float:
        """Return the value as a number; parsed and checked where it was typed."""
        return float(self.value.removesuffix("x"))


@dataclass(frozen=True, kw_only=True)
class Change:
    """One kind of change. Functions take the value: as typed, or as parsed."""

    parse: Callable[[str], str]  # raises UsageError
    words: Callable[[str], str]
    is_at_hand: Callable[[str], bool] = lambda _: True  # for the user of the job: not for who buys devices and networks
    metavar: str = ""  # of its option; empty: it is given as --fix NAME=VALUE
    help: str = ""


def _parse_ranks(text: str) -> str:
    if not re.fullmatch(r"\d{1,7}(,\d{1,7})*", text):
        raise UsageError(f"--fix is 'rank={text}'; expected ranks by number, for example rank=3 or rank=3,7")
    return text


def _parse_stage(text: str) -> str:
    if text != LAST and not re.fullmatch(r"\d{1,7}", text):
        raise UsageError(f"--fix is 'stage={text}'; expected the number of a stage, or stage={LAST}")
    return text


def _parse_factor(option: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        factor = plain_number(text.removesuffix("x"))
        if not 0 < factor <= MAX_FACTOR:
            most = f"{MAX_FACTOR:g}"
            raise UsageError(f"--{option} is {text!r}; expected a factor above 0, at most {most}, for example 2x")
        return f"{factor:g}x"

    return parse


def _parse_choice(option: str, *values: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in values:
            raise UsageError(f"--{option} is {text!r}; expected {' or '.join(values)}")
        return text

    return parse


def _parse_number(option: str) -> Callable[[str], str]:
    return lambda text: str(parse_whole(f"--{option}", text, 1, MAX_NUMBER))


def _parse_operation(text: str) -> str:
    if not text:
        raise UsageError(f"--without is empty; expected an operation, for example {BARRIER}")
    return text


def _parse_bucket_size(text: str) -> str:
    size = size_bytes(text, unit="B")
    if size is None or size < 1:
        raise UsageError(f"--buckets is {text!r}; expected a size above 0, for example 50MB or 26214400")
    return str(round(size))


def parse_schedule(text: str) -> str:
    """Return the name of a schedule.

    Raises:
        UsageError: there is none of this name.
    """
    name = text.lower().removeprefix("schedule").replace("_", "-")
    name = _ALIASES.get(name.replace("-", ""), _ALIASES.get(name, name))
    if name not in SCHEDULES:
        raise UsageError(f"--schedule is {text!r}; expected one of {', '.join(SCHEDULES)}")
    return name


CHANGES = {
    RANK: Change(
        parse=_parse_ranks,
        words=lambda ranks: f"rank{'s' if ',' in ranks else ''} {ranks.replace(',', ', ')} as fast as the others",
    ),
    HOST: Change(parse=str, words=lambda host: f"host {host} as fast as the others"),
    STAGE: Change(parse=_parse_stage, words=lambda stage: f"stage {stage} as fast as the others"),
    OP: Change(parse=str, words=lambda op: f"{op} alike on all ranks and in all steps", is_at_hand=lambda _: False),
    PHASE: Change(
        parse=str,
        words=lambda phase: OFF_THE_PATH.get(phase, (f"{phase} alike on all ranks and in all steps",))[0],
        is_at_hand=OFF_THE_PATH.__contains__,
    ),
    NETWORK: Change(
        parse=_parse_factor(NETWORK),
        words=lambda factor: f"transfers {factor} as fast",
        is_at_hand=lambda _: False,
        metavar="F",
        help="transfers F times as fast, for example 2x",
    ),
    COMPUTE: Change(
        parse=_parse_factor(COMPUTE),
        words=lambda factor: f"computation {factor} as fast",
        is_at_hand=lambda _: False,
        metavar="F",
        help="computation F times as fast, for example 1.5x",
    ),
    OVERLAP: Change(
        parse=_parse_choice(OVERLAP, FULL),
        words=lambda _: "collectives fully overlapped with computation",
        is_at_hand=lambda _: False,
        metavar=FULL,
        help="collectives are waited for at the end of the step only",
    ),
    SYNC: Change(
        parse=_parse_choice(SYNC, LAST),
        words=lambda _: "gradients reduced in the last backward pass of a step alone (no_sync())",
        metavar=LAST,
        help="gradients reduced in the last backward pass of a step alone, as with no_sync() of DDP around the others",
    ),
    WITHOUT: Change(
        parse=_parse_operation,
        words=lambda op: f"no {op}",
        is_at_hand=BARRIER.__eq__,
        metavar="OP",
        help="an operation that nobody issues any more, such as barrier",
    ),
    MICROBATCHES: Change(
        parse=_parse_number(MICROBATCHES),
        words=lambda number: f"{number} microbatches",
        metavar="N",
        help="divide the batch of a pipeline's step into N",
    ),
    SCHEDULE: Change(
        parse=parse_schedule,
        words=lambda name: f"the pipeline schedule {name}",
        metavar="NAME",
        help=f"of the pipeline: {', '.join(SCHEDULES)}",
    ),
    SPLIT: Change(
        parse=_parse_choice(SPLIT, EVEN),
        words=lambda _: "layers divided so that all stages take equally long",
        metavar=EVEN,
        help="layers of a pipeline divided so that all stages take equally long",
    ),
    BUCKETS: Change(
        parse=_parse_bucket_size,
        words=lambda size: f"gradient buckets of {format_bytes(int(size)) if size.isdecimal() else size}",
        metavar="SIZE",
        help="gradients reduced in buckets of this size, for example 50MB",
    ),
    REDUCE_DTYPE: Change(
        parse=_parse_choice(REDUCE_DTYPE, *HALF_WIDTH),
        words=lambda dtype: f"gradients reduced in {dtype}",
        metavar="|".join(HALF_WIDTH),
        help="gradients of 32 bits reduced in 16, on devices: reduce_dtype of FSDP, bf16_compress_hook of DDP",
    ),
    RANKS: Change(
        parse=_parse_number(RANKS),
        words=lambda number: f"{number} ranks",
        is_at_hand=lambda _: False,
        metavar="N",
        help="N ranks in all, by more data-parallel replicas",
    ),
}
"""By name, in the order in which those of one scenario are named."""
OPTIONS = {name.replace("-", "_"): name for name, change in CHANGES.items() if change.metavar}
"""The changes that are options, by the names of Python's arguments."""


def parse_fixes(named: Sequence[str], options: Mapping[str, str | None]) -> list[Fix]:
    """Return changes given as WHAT=NAME, and by options as OPTIONS names them.

    Raises:
        UsageError: one is none, or its value cannot be.
    """
    return [
        *map(parse_fix, named),
        *(parse_option(OPTIONS[name], text) for name, text in options.items() if text is not None),
    ]


def parse_fix(text: str) -> Fix:
    """Return a change given as WHAT=NAME.

    Raises:
        UsageError: it is none.
    """
    what, _, value = map(str.strip, text.partition("="))
    names = [name for name, change in CHANGES.items() if not change.metavar]
    if what not in names or not value:
        raise UsageError(
            f"--fix is {text!r}; expected {', '.join(f'{name}=...' for name in names)}, for example rank=3"
        )
    return Fix(what=what, value=CHANGES[what].parse(value))


def parse_option(name: str, text: str) -> Fix:
    """Return a change given by an option.

    Raises:
        UsageError: its value cannot be.
    """
    return Fix(what=name, value=CHANGES[name].parse(text.strip()))


def describe(names: Sequence[str]) -> str:
    """Return for people what changes, named as results name them, are."""
    return ", and ".join(CHANGES[what].words(value) for what, _, value in (name.partition("=") for name in names))


def is_at_hand(names: Sequence[str]) -> bool:
    """Say whether changes, named as results name them, are in the hands of the user of the job."""
    return all(CHANGES[what].is_at_hand(value) for what, _, value in (name.partition("=") for name in names))
