"""Findings and the verdict of `dtprof diagnose`, as data. The JSON contract is docs/reference/diagnose.md."""

from dataclasses import dataclass, field, replace

from dtprof.formatting import list_ranks
from dtprof.job.axes import DEFAULT_GROUP_WORDS, is_default
from dtprof.records.sites import Site
from dtprof.records.tables import Group
from dtprof.text_enum import TextEnum

SCHEMA = 1
ONLY_BRANCH = "no other branch or exit skips the call"


class Evidence(TextEnum):
    """What a finding rests on, where generated programs show how often findings of a kind are right on such evidence.

    The rates are in `measured_rates.RATES`, by kind and evidence.
    """

    DIRECT = "what the culprit did or left shows the fault"
    FIRST_TIME = "the culprit made the call, or used the tag, for the first time"
    OWN_ITERATIONS = "the culprit left the pattern of its own iterations"
    OTHER_END = "the other end of a message is missing, and its rank is elsewhere"
    EITHER_END = "the same, and either end may be the wrong one"
    BUSY = "a process that works, and nothing it does distinguishes it from a loop without end"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One cause with evidence and advice; consequences of a cause are evidence of its finding."""

    kind: str
    summary: str
    culprit_ranks: tuple[int, ...]
    grade: float  # how sure the rule is, as its author judges it
    evidence_class: Evidence | None = None  # None: no rate was measured
    measured_rate: float | None = None  # of its kind and evidence, which the verdict adds
    severity: str = "error"  # or warning; info: a note on what is no fault
    waiting_ranks: tuple[int, ...] = ()
    group: Group | None = None
    op: str | None = None
    seq: int | None = None
    step: int | None = None
    call_sites: dict[int, Site] = field(default_factory=dict)
    culprit_call_sites: dict[int, Site] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    leaves_open: tuple[str, ...] = ()  # questions about its subject that the sources leave open
    culprit_hosts: tuple[str, ...] = ()  # of the culprits, in a job of several hosts
    is_early: bool = False  # in the first step of the culprits, or the first operation of a group: either may take long

    @property
    def confidence(self) -> float:
        """How often such findings are right: measured where it can be, else judged."""
        return self.measured_rate if self.measured_rate is not None else self.grade


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The findings, the most probable cause first."""

    outcome: str
    source: tuple[str, ...]
    ranks_seen: tuple[int, ...]
    ranks_missing: tuple[int, ...]
    findings: tuple[Finding, ...] = ()
    cannot_tell: tuple[str, ...] = ()

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The findings that are errors or warnings."""
        return tuple(finding for finding in self.findings if finding.severity in ("error", "warning"))


def explain(cause: Finding, consequence: Finding) -> Finding:
    """Return a cause with a finding that follows from it as its last evidence."""
    return replace(cause, evidence=(*cause.evidence, consequence.summary))


def capitalised(ranks: tuple[int, ...] | list[int]) -> str:
    """Return ranks in words, to begin a sentence with."""
    return list_ranks(ranks).capitalize()


def wait_words(ranks: tuple[int, ...] | list[int]) -> str:
    """Return `rank 2 waits`, `ranks 0, 1 wait`, `no rank is seen to wait`."""
    if not ranks:
        return "no rank is seen to wait"
    return f"{list_ranks(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def group_words(group: Group | None) -> str:
    """Return a group as users know it."""
    if group is None:
        return "an unknown group"
    if is_default(group):
        return DEFAULT_GROUP_WORDS
    text = f"group {group.name}"
    return f"{text} ({group.description})" if group.description not in ("", "undefined") else text


def skip_evidence(rank: int, site: Site, *, branch: str = "", reason: str = "") -> str:
    """Say by which branch or exit of the source a rank may have skipped a call."""
    by = f" by the {branch}" if branch else ""
    return f"rank {rank} may have skipped it{by}{at_line(site)}{f': {reason}' if reason else ''}"


def at_line(site: Site | None) -> str:
    """Return ` at FILE:LINE (FUNCTION)`, empty where the place is not known."""
    return f" at {site.file}:{site.line} ({site.function})" if site else ""
