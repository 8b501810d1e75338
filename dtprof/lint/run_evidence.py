"""Check a finding against a run: which ranks issued its line, and whether the members of the group agreed."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import PurePath

from dtprof.lint.lint_findings import LintFinding, LintResult, RunEvidence, SourceLocation

CONFIRMED, ACQUITTED, NOT_RUN = "confirmed", "acquitted", "not-run"


@dataclass(kw_only=True)
class GroupCalls:
    """The collectives of one group: operation and line of each call of each member, in order."""

    ranks: tuple[int, ...]
    calls: dict[int, list[tuple[str, str, int]]] = field(default_factory=dict)  # rank -> (operation, file, line)


def confirm(result: LintResult, groups: Iterable[GroupCalls]) -> LintResult:
    """Return the findings with the verdict of a run; those that it acquits no longer count."""
    known = list(groups)
    return replace(result, findings=tuple(_judge(finding, known) for finding in result.findings))


def _judge(finding: LintFinding, groups: list[GroupCalls]) -> LintFinding:
    verdicts = [ran for group in groups if (ran := _in_group(finding.ran_there, group)) is not None]
    wrong = next((ran for ran in verdicts if ran.verdict == CONFIRMED), None)
    if wrong is not None:
        return replace(finding, ran=wrong, severity="error")
    if verdicts:
        return replace(finding, ran=verdicts[0], severity=ACQUITTED)
    return replace(
        finding,
        ran=RunEvidence(
            verdict=NOT_RUN, counts={}, text="the run holds no call of this line: no rank came to it, or it was refused"
        ),
    )


def _in_group(places: tuple[SourceLocation, ...], group: GroupCalls) -> RunEvidence | None:
    lines = {(place.file, place.line) for place in places}
    counts = {rank: sum(_is_there(call, lines) for call in group.calls.get(rank, ())) for rank in group.ranks}
    if not any(counts.values()):
        return None
    if any(rank not in group.calls for rank in group.ranks):
        silent = [rank for rank in group.ranks if rank not in group.calls]
        if all(counts[rank] for rank in group.ranks if rank not in silent) and len(silent) < len(group.ranks) / 2:
            return RunEvidence(
                verdict=CONFIRMED, counts=counts, text=f"{_ranks(silent)} never called anything in its group"
            )
    positions = [
        position
        for rank in group.ranks
        for position, call in enumerate(group.calls.get(rank, ()))
        if _is_there(call, lines)
    ]
    lengths = {len(group.calls.get(rank, ())) for rank in group.ranks}
    for position in sorted(set(positions)):
        made = {
            r: rank_calls[position][0] if position < len(rank_calls := group.calls.get(r, [])) else "nothing"
            for r in group.ranks
        }
        if len(set(made.values())) > 1:
            usual = Counter(made.values()).most_common(1)[0][0]
            odd = [rank for rank, what in made.items() if what != usual]
            return RunEvidence(
                verdict=CONFIRMED,
                counts=counts,
                text=f"at #{position} of the group, {_ranks(odd)} issued {made[odd[0]]}, the others {usual}",
            )
    if len(set(counts.values())) > 1 and (len(lengths) > 1 or _is_shifted(group, lines)):
        return RunEvidence(verdict=CONFIRMED, counts=counts, text=f"the line ran {_counts(counts)}")
    return RunEvidence(verdict=ACQUITTED, counts=counts, text=f"every member made the same calls ({_counts(counts)})")


def _is_shifted(group: GroupCalls, lines: set[tuple[str, int]]) -> bool:
    """Say whether calls of the line match calls of varying other lines: then their positions agree by chance."""
    met: dict[tuple[int, str, int], set[tuple[str, int]]] = {}
    for rank, rank_calls in group.calls.items():
        for position, call in enumerate(rank_calls):
            if not _is_there(call, lines):
                continue
            for other, theirs in group.calls.items():
                if other != rank and position < len(theirs):
                    met.setdefault((other, call[1], call[2]), set()).add(theirs[position][1:])
    return any(len(places) > 1 for places in met.values())


def _is_there(call: tuple[str, str, int], lines: set[tuple[str, int]]) -> bool:
    return any(call[2] == line and _is_same_file(call[1], file) for file, line in lines)


def _is_same_file(recorded: str, given: str) -> bool:
    """Compare paths from the end: the job may have run in another folder, or on another host."""
    a, b = PurePath(recorded).parts, PurePath(given).parts
    common = min(len(a), len(b), 3)
    return bool(common) and a[-common:] == b[-common:]


def _ranks(ranks: list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks[:8]))}"


def _counts(counts: dict[int, int]) -> str:
    by_count: dict[int, list[int]] = {}
    for rank, count in counts.items():
        by_count.setdefault(count, []).append(rank)
    return "; ".join(f"{count} times on {_ranks(ranks)}" for count, ranks in sorted(by_count.items(), reverse=True))
