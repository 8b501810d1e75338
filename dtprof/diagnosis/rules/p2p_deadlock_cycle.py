"""Ranks wait for the messages of one another in a ring."""

from collections import Counter
from collections.abc import Iterator

from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Evidence, Finding, at_line, capitalised
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.p2p_messages import message_finding, message_words
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.diagnosis.rules.p2p_unmatched import find_omitted, find_other_partner
from dtprof.job.wait_graph import Wait, went_astray

MIN_ROUNDS = 2
"""Messages at one line after which the rank has made rounds."""


def find_message_cycle(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks that wait for one another's messages in a ring."""
    job, waits, cycle = case.job, case.job.waits, case.cycle
    inside = {
        rank: wait
        for rank in cycle
        for wait in waits[rank][:1]
        if wait.operation.p2p and any(r in cycle for r in wait.awaited)
    }
    if len(cycle) < 2 or len(inside) < len(cycle):
        return
    if sum(went_astray(job.ranks, wait) for wait in inside.values()) == 1 and not _are_all_new(job, inside):
        return  # one turned to the wrong peer: the others wait as they always did
    left_out_or_apart = (*case.findings(find_omitted), *case.findings(find_other_partner))
    if any(set(finding.culprit_ranks) < set(cycle) for finding in left_out_or_apart):
        return
    facts = tuple(
        f"rank {r}: {message_words(w.operation)}{at_line(w.operation.site)}" for r, w in sorted(inside.items())[:8]
    )
    kinds = {wait.operation.op for wait in inside.values()}
    both = "receives before it sends" if kinds == {"recv"} else "sends before it receives"
    middle = both if len(kinds) == 1 else "waits for the next"
    name = capitalised(cycle)
    yield message_finding(
        "p2p-deadlock-cycle",
        f"{name} wait for one another in a cycle of messages: each {middle}.",
        job=job,
        operations={rank: wait.operation for rank, wait in inside.items()},
        culprits=cycle,
        grade=0.95,
        evidence_class=Evidence.DIRECT,
        facts=facts,
        advice="Let every second rank take the other order, or post all of them with batch_isend_irecv before waiting.",
    )


def _are_all_new(job: JobState, inside: dict[int, Wait]) -> bool:
    """Say whether all ranks of a cycle are at lines that none of them came to in the rounds it has made before."""
    for rank, wait in inside.items():
        lines = Counter(o.site for o in job.ranks[rank].operations if o.p2p)
        if lines[wait.operation.site] > 1 or max(lines.values(), default=0) < MIN_ROUNDS:
            return False
    return True


# NCCL raises where two ranks that first use a connection both send over it.
RULES: Declared = (
    Rule(kinds=("p2p-deadlock-cycle",), stages=(Stage.BROKEN_MESSAGE, Stage.WAIT), find=find_message_cycle),
)
