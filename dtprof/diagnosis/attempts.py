"""Compare the attempts of a restarted job: a fault of the program, or of a host."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from dtprof.diagnosis.findings import Finding, Verdict, at_line, capitalised
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.verdict import decide

ENDED = ("rank-crashed", "rank-killed", "rank-exited")
MAX_ATTEMPTS = 8
"""Attempts that are compared, the newest."""
MAX_CHANCE = 0.25
"""How probable it may be that culprits in any places lie on one host each time, for it to mean anything."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """How one attempt ended."""

    verdict: Verdict
    hosts: Mapping[int, str]  # by rank

    @property
    def finding(self) -> Finding | None:
        """The cause of its end."""
        failed = self.verdict.outcome in ("hang", "crash")
        return self.verdict.findings[0] if failed and self.verdict.findings else None


def judge(job: JobState) -> Attempt:
    """Return how an attempt ended."""
    return Attempt(verdict=decide(job), hosts={rank.rank: rank.host for rank in job.ranks.values()})


def remember(last: Attempt, earlier: Sequence[Attempt]) -> Verdict:
    """Return the verdict on the last attempt, with evidence of the earlier ones on its first finding.

    The same operation of the same group at the same line in every attempt is a fault of the program; culprits on one
    and the same host in every attempt, at different places, point at that host.
    """
    finding = last.finding
    failed = [attempt for attempt in earlier if attempt.finding is not None]
    if finding is None and last.verdict.outcome == "unknown" and failed and failed[-1].finding is not None:
        before = f"an earlier attempt failed, this one shows nothing wrong: {failed[-1].finding.summary}"
        return replace(last.verdict, cannot_tell=(before, *last.verdict.cannot_tell))
    if finding is None or not failed:
        return last.verdict
    attempts = [*failed, last]
    words = _words(finding, attempts)
    if words is None:
        return last.verdict
    fact, advice = words
    extended = replace(finding, evidence=(fact, *finding.evidence), advice=(advice, *finding.advice))
    return replace(last.verdict, findings=(extended, *last.verdict.findings[1:]))


def _words(finding: Finding, attempts: Sequence[Attempt]) -> tuple[str, str] | None:
    number = f"all {len(attempts)} attempts" if len(attempts) > 2 else "both attempts"
    findings = [attempt.finding for attempt in attempts if attempt.finding is not None]
    if len({_place(found) for found in findings}) == 1:
        site = next(iter(finding.culprit_call_sites.values()), None)
        return (
            f"the same in {number}: {finding.kind} at the same place{at_line(site)}",
            f"Fix the program or its data{' at that line' if site is not None else ''}: a restart ends there again.",
        )
    host = _same_host(attempts)
    if host is None:
        return None
    before = "; ".join(f"{capitalised(found.culprit_ranks)}, {found.kind}" for found in findings[:-1])
    return (
        f"in {number} the culprit ran on host {host}, each time at another place; before: {before}",
        f"Look at host {host} (memory, devices, disks, network), or leave it out of the next job.",
    )


def _same_host(attempts: Sequence[Attempt]) -> str | None:
    """Return the host of the culprits of every attempt, None where it is not one, or may be one by chance."""
    found, chance = set(), 1.0
    for attempt in attempts:
        culprits = attempt.finding.culprit_ranks if attempt.finding is not None else ()
        found |= {attempt.hosts.get(rank, "") for rank in culprits} or {""}
        chance /= max(1, len(set(attempt.hosts.values())))
    chance *= max(1, len(set(attempts[-1].hosts.values())))  # the first attempt may name any host
    host = found.pop()
    return host if not found and host and chance <= MAX_CHANCE else None


def _place(finding: Finding) -> Hashable:
    """Return the facts that are equal in two attempts that end at the same place of the program."""
    lines = frozenset((site.file, site.line) for site in finding.culprit_call_sites.values())
    if finding.kind in ENDED:
        return finding.kind, lines, finding.step
    return finding.kind, lines, finding.group and finding.group.name, finding.op, finding.seq
