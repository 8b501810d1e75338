"""Several threads issue on one group by turns: a note."""

from collections.abc import Iterator

import numpy as np

from dtprof.columns import distinct
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, group_words
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks
from dtprof.job.group_collectives import group_tables, is_of_one_thread, program_calls

MIN_TURNS = 3
"""Changes from thread to thread that are more than handing the group over."""


def find_shared_groups(case: Case) -> Iterator[Finding]:
    """Give a note for each group that threads of a rank issue on by turns."""
    job = case.job
    for group, tables in group_tables(job.ranks).items():
        calls = {r: program_calls(table)["thread"] for r, table in tables.items() if not is_of_one_thread(table)}
        ranks = tuple(r for r, threads in sorted(calls.items()) if int((np.diff(threads) != 0).sum()) >= MIN_TURNS)
        if ranks:
            known = job.group(group)
            number = max(len(distinct(calls[rank])) for rank in ranks)
            yield Finding(
                kind="shared-group",
                severity="info",
                summary=f"{number} threads issue on {group_words(known)} by turns on {list_ranks(ranks)}; "
                "it did not hang: all ranks took them in one order.",
                culprit_ranks=ranks,
                grade=0.7,
                group=known,
                advice=("Where nothing fixes their order, give each thread a group of its own.",),
            )


RULES: Declared = (Rule(kinds=("shared-group",), stages=(Stage.NOTE,), find=find_shared_groups),)
