"""The findings of lint. The JSON contract is docs/reference/lint.md."""

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
class SourceLocation:
    """A place in the source."""

    file: str
    line: int
    column: int
    text: str = ""


@dataclass(frozen=True, kw_only=True)
class RunEvidence:
    """The calls of a finding's line in a run."""

    verdict: str  # confirmed, acquitted, not-run
    counts: dict[int, int]  # calls by rank of the group, where the line ran
    text: str


@dataclass(frozen=True, kw_only=True)
class LintFinding:
    """A collective that ranks may not issue in the same way."""

    kind: str
    severity: str  # error, warning; acquitted: sound in a run
    place: SourceLocation  # of the collective
    function: str
    op: str
    group: str | None  # by its name in the source; None: the default group
    summary: str
    why: str
    advice: str
    condition: SourceLocation | None = None  # the condition it depends on
    called_from: SourceLocation | None = None  # the collective stands in a function that this line calls
    ran: RunEvidence | None = None
    ran_there: tuple[SourceLocation, ...] = ()  # all lines whose records are evidence


@dataclass(frozen=True, kw_only=True)
class LintResult:
    """The findings of all files."""

    files: int
    findings: tuple[LintFinding, ...]
    ignored: int = 0  # findings covered by a comment with a reason
    problems: tuple[str, ...] = ()
    unreadable: bool = False  # a file that was named could not be read


@dataclass(frozen=True, kw_only=True)
class HandledCall:
    """A collective that a handler or a finally block issues itself, not in a function that it calls."""

    place: SourceLocation  # its text is that of the line
    handler: SourceLocation
    is_finally: bool = False
