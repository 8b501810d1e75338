"""Ranks that wait in one more call of a line than most, which made all of theirs and ended."""

from collections.abc import Iterator

import numpy as np

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised, explain, group_words
from dtprof.diagnosis.rule import Declared, Refinement, Stage
from dtprof.formatting import list_ranks, plural
from dtprof.job.group_collectives import group_tables, line_of


def explain_exit_by_majority(case: Case, left: Finding) -> Iterator[Finding]:
    """Give the finding for ranks that wait in one more call of a line than most, who made all of theirs and ended.

    Who ends itself, by `sys.exit` for example, has not come to the end of its program.
    """
    job = case.job
    gone = [job.ranks[rank] for rank in left.culprit_ranks if rank in job.ranks]
    waiting = {
        rank: o for rank in left.waiting_ranks if (o := job.ranks[rank].first_blocking) is not None and not o.p2p
    }
    group = next((o.group for o in waiting.values()), None)
    tables = group_tables(job.ranks).get(group, {}) if group is not None else {}
    if group is None or len(tables) < len(group.ranks) or len(tables) != len(gone) + len(waiting):
        return
    seqs = {o.seq for o in waiting.values()} | {len(tables[rank.rank]) for rank in gone if rank.rank in tables}
    lines = {line_of(o.site) for o in waiting.values()}
    # Who left by sys.exit or an early return may have made too few calls; only an orderly end shows that the
    # calls were all.
    is_end = len(gone) > len(waiting) and all(rank.finished and rank.left_at is None for rank in gone)
    is_again = len(seqs) == len(lines) == 1 and all(np.isin([*lines], tables[r.rank]["line"]).all() for r in gone)
    if is_end and is_again:
        first = next(iter(waiting.values()))
        culprits, words = tuple(sorted(waiting)), f"{plural(first.seq, 'call')} of {group_words(job.group(group))}"
        yield explain(
            Finding(
                kind="step-mismatch",
                summary=f"{capitalised(culprits)} made more rounds than the others, which ended after {words}, "
                f"and went on to one more {first.op}{at_line(first.site)}.",
                culprit_ranks=culprits,
                grade=0.75,
                group=job.group(group),
                op=first.op,
                seq=first.seq,
                step=first.step,
                culprit_call_sites=call_sites(waiting),
                evidence=(f"{list_ranks(left.culprit_ranks)} came to the end of the program after equally many calls",),
                advice=("Look for a batch, a retry or a warm-up that only this rank makes.",),
            ),
            left,
        )


RULES: Declared = (
    Refinement(
        kinds=("step-mismatch",),
        causes=("rank-exited",),
        stages=(Stage.WAIT, Stage.LATE),
        refine=explain_exit_by_majority,
    ),
)
