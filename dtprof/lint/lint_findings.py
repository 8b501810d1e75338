"""What lint finds, as data. The JSON contract is docs/reference/lint.md."""

from dataclasses import dataclass

SCHEMA = 1
KINDS = (
    "rank-dependent-collective",
    "rank-dependent-exit",
    "rank-dependent-loop",
    "rank-dependent-argument",
    "rank-dependent-group-order",
    "data-dependent-collective",
    "collective-in-except",
    "collective-in-finally",
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """A place in the source."""

    file: str
    line: int
    column: int
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What a run shows of the line of a finding."""

    verdict: str  # confirmed, acquitted, not-run
    counts: dict[int, int]  # calls by rank of the group, where the line ran
    text: str


@dataclass(frozen=True, kw_only=True)
class LintFinding:
    """A collective that ranks may not issue alike."""

    kind: str
    severity: str  # error, warning; acquitted: what a run has shown to be sound
    place: Place  # of the collective
    function: str
    op: str
    group: str | None  # as the source names it; None: the default group
    summary: str
    why: str
    advice: str
    condition: Place | None = None  # on what it depends
    called_from: Place | None = None  # where the collective lies in a function that is called here
    ran: Ran | None = None
    ran_there: tuple[Place, ...] = ()  # all lines whose records tell of it


@dataclass(frozen=True, kw_only=True)
class LintResult:
    """Everything found in the files given."""

    files: int
    findings: tuple[LintFinding, ...]
    ignored: int = 0  # findings that a comment with a reason covers
    problems: tuple[str, ...] = ()
    unreadable: bool = False  # a file that was named could not be read


@dataclass(frozen=True, kw_only=True)
class HandledCall:
    """A collective that stands in an exception handler itself, not in a function called there."""

    place: Place  # its text is that of the line
    handler: Place
