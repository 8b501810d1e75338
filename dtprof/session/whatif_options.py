"""Changes as they are typed, on the command line and in Python."""

import re
from collections.abc import Mapping, Sequence

from dtprof.analysis.whatif.fixes import (
    BUCKETS,
    COMPUTE,
    EVEN,
    HALF_WIDTH,
    HOST,
    LAST,
    MICROBATCHES,
    NETWORK,
    OP,
    OVERLAP,
    PHASE,
    RANK,
    RANKS,
    REDUCE_DTYPE,
    SCHEDULE,
    SPLIT,
    STAGE,
    SYNC,
    WITHOUT,
    Fix,
)
from dtprof.analysis.whatif.schedule_fixes import parse_schedule
from dtprof.errors import UsageError
from dtprof.typed_quantities import parse_whole, plain_number, size_bytes

NAMED = (RANK, HOST, STAGE, OP, PHASE)
OPTIONS = (NETWORK, COMPUTE, OVERLAP, SYNC, WITHOUT, MICROBATCHES, SCHEDULE, SPLIT, BUCKETS, REDUCE_DTYPE, RANKS)
ARGUMENTS = {name.replace("-", "_"): name for name in OPTIONS}
"""The options by the names of Python's arguments."""
ONLY = {OVERLAP: "full", SYNC: LAST, SPLIT: EVEN}
"""Options with one value."""
MAX_NUMBER = 1 << 20
MAX_FACTOR = 1000.0


def parse_fixes(named: Sequence[str], options: Mapping[str, str | None]) -> list[Fix]:
    """Return changes given as WHAT=NAME, and by options as ARGUMENTS names them.

    Raises:
        UsageError: one is none, or its value cannot be.
    """
    return [
        *map(parse_fix, named),
        *(parse_option(ARGUMENTS[name], text) for name, text in options.items() if text is not None),
    ]


def parse_fix(text: str) -> Fix:
    """Return a change given as WHAT=NAME.

    Raises:
        UsageError: it is none.
    """
    what, _, value = text.partition("=")
    what, value = what.strip(), value.strip()
    if what not in NAMED or not value:
        raise UsageError(
            f"--fix is {text!r}; expected {', '.join(f'{name}=...' for name in NAMED)}, for example rank=3"
        )
    if what == RANK and not re.fullmatch(r"\d{1,7}(,\d{1,7})*", value):
        raise UsageError(f"--fix is {text!r}; expected ranks by number, for example rank=3 or rank=3,7")
    if what == STAGE and value != LAST and not re.fullmatch(r"\d{1,7}", value):
        raise UsageError(f"--fix is {text!r}; expected the number of a stage, or stage={LAST}")
    return Fix(what=what, value=value)


def parse_option(name: str, text: str) -> Fix:
    """Return a change given by an option.

    Raises:
        UsageError: its value cannot be.
    """
    text = text.strip()
    if name in (NETWORK, COMPUTE):
        factor = plain_number(text.removesuffix("x"))
        if not 0 < factor <= MAX_FACTOR:
            raise UsageError(f"--{name} is {text!r}; expected a factor above 0, at most {MAX_FACTOR:g}, for example 2x")
        return Fix(what=name, value=f"{factor:g}x")
    if name in ONLY:
        if text != ONLY[name]:
            raise UsageError(f"--{name} is {text!r}; expected {ONLY[name]}")
        return Fix(what=name, value=text)
    if name == WITHOUT:
        if not text:
            raise UsageError("--without is empty; expected an operation, for example barrier")
        return Fix(what=name, value=text)
    if name == REDUCE_DTYPE:
        if text not in HALF_WIDTH:
            raise UsageError(f"--{name} is {text!r}; expected {' or '.join(HALF_WIDTH)}")
        return Fix(what=name, value=text)
    if name == SCHEDULE:
        return Fix(what=name, value=parse_schedule(text))
    if name == BUCKETS:
        size = size_bytes(text, unit="B")
        if size is None or size < 1:
            raise UsageError(f"--buckets is {text!r}; expected a size above 0, for example 50MB or 26214400")
        return Fix(what=name, value=str(round(size)))
    return Fix(what=name, value=str(parse_whole(f"--{name}", text, 1, MAX_NUMBER)))
