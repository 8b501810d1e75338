"""Declarations of a file in `rules/`: rules find causes, refinements explain the causes of others."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum, auto

from dtprof.diagnosis.case import Case, Find
from dtprof.diagnosis.findings import Finding


class Stage(Enum):
    """When a rule applies. Up to SUSPICION the first finding is the cause; later stages list all they find."""

    NAMED = auto()
    """A sentence of a log names the fault. Asked first where there are only logs, else before SUSPICION."""
    DEATH = auto()
    """A rank failed first, by its own doing."""
    ABORT = auto()
    """Native code crashed inside an operation: a backend may have aborted a process for the fault of another rank."""
    DIVERGENCE = auto()
    """Programs of ranks went different ways."""
    BROKEN_MESSAGE = auto()
    """Messages of a wrong size, which make a backend abort beside a divergence."""
    WAIT = auto()
    """Wait-for graph between ranks."""
    STALL = auto()
    """All issued an operation, and it does not complete."""
    LATE = auto()
    """A rank ended, and no operation is known to have failed before."""
    SUSPICION = auto()
    """Last resort: suspects from timeouts, lost peers and exit statuses."""
    BESIDE_CRASH = auto()
    """Completed before a rank raised, and may be the reason."""
    BESIDE_HANG = auto()
    """Completed before the job stalled, and a fault of its own."""
    MISPAIRED = auto()
    """Completed operations are mismatched. Only the first rule that finds some applies: later ones see consequences."""
    RISK = auto()
    """A risk or a cost of a job that makes progress."""
    WHOLE_JOB = auto()
    """True of the job however it fares: reported beside its cause or its risks, and never in their place."""
    NOTE = auto()
    """A risk in a group that did not hang: dropped for groups that are MISPAIRED."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Finds causes of certain kinds in a case."""

    kinds: tuple[str, ...]
    stages: tuple[Stage, ...]
    find: Find
    finds_all: bool = False  # each of its findings is a fault of its own; else the first is the most probable
    leave_open: Callable[[Case], Iterable[str]] = lambda _: ()  # why it finds nothing, where that is worth saying


@dataclass(frozen=True, kw_only=True)
class Refinement:
    """Finds the deeper cause of a finding."""

    kinds: tuple[str, ...]
    causes: tuple[str, ...]  # kinds of causes that it may explain
    stages: tuple[Stage, ...]  # of those causes
    refine: Callable[[Case, Finding], Iterable[Finding]]  # better causes, the first in place of the one given


Declared = tuple[Rule | Refinement, ...]
