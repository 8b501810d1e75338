"""A host of several is heard of no more, and ranks of the others wait for its ranks."""

from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import call_sites, last_sites_of
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words, wait_words
from dtprof.diagnosis.job_state import RankState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks, plural
from dtprof.job.issued_operations import Operation

MOST_HOSTS = 4
"""Named in a sentence."""


def find_silent(case: Case) -> Iterator[Finding]:
    """Give the finding for hosts that are silent while others are heard of and wait for them.

    What the last records of a silent rank show is where it was heard of last, and not where it is: so this comes
    before rules that compare the positions of ranks.
    """
    job = case.job
    silent = {rank.rank: rank for rank in job.ranks.values() if rank.host in job.silent_s and _may_run(rank)}
    if not (silent and job.stalled):
        return
    waiting = {
        rank.rank: operation
        for rank in job.ranks.values()
        if rank.rank not in silent and _may_run(rank) and (operation := rank.first_blocking) is not None
        if _members(operation) & silent.keys()
    }
    if waiting:
        yield _finding(case, silent, waiting)


def _may_run(rank: RankState) -> bool:
    return rank.exit is None and not rank.finished


def _members(operation: Operation) -> set[int]:
    return {operation.peer_rank} if operation.p2p else set(operation.group.ranks)


def _finding(case: Case, silent: dict[int, RankState], waiting: dict[int, Operation]) -> Finding:
    job = case.job
    hosts = sorted({rank.host for rank in silent.values()})
    heard = {rank.host for rank in job.ranks.values()} - set(hosts)
    named = ", ".join(hosts[:MOST_HOSTS]) + (f" and {len(hosts) - MOST_HOSTS} more" if len(hosts) > MOST_HOSTS else "")
    first = min(waiting.values(), key=lambda operation: operation.issued_ns)
    group = job.group(first.group)
    verb = "has" if len(hosts) == 1 else "have"
    quiet_s = min(job.silent_s[host] for host in hosts)
    return Finding(
        kind="host-silent",
        summary=f"{'Host' if len(hosts) == 1 else 'Hosts'} {named} ({list_ranks(silent)}) {verb} not been "
        f"heard of for {quiet_s:.0f} s; {wait_words(sorted(waiting))} in {first.op} #{first.seq} of "
        f"{group_words(group)}.",
        culprit_ranks=tuple(sorted(silent)),
        waiting_ranks=tuple(sorted(waiting)),
        grade=0.85 if len(hosts) <= len(heard) else 0.5,
        group=group,
        op=first.op,
        seq=first.seq,
        call_sites=call_sites(waiting),
        culprit_call_sites=last_sites_of(silent.values()),
        evidence=(
            f"samples of {plural(len(heard), 'other host')} came until {quiet_s:.0f} s after the last of {named}",
            *(
                f"{capitalised((r,))} was heard of last{at_line(rank.last_site)}"
                for r, rank in sorted(silent.items())[:3]
            ),
        ),
        advice=(
            f"See whether {hosts[0]} runs and can be reached: power, kernel log, network between the hosts.",
            "If it runs, its own records go on: dtprof collect --send there, or diagnose its run directory as well.",
        ),
        leaves_open=(f"whether {named} stopped, or only the network to it: both end what is heard of it",),
    )


RULES: Declared = (Rule(kinds=("host-silent",), stages=(Stage.DEATH,), find=find_silent),)
