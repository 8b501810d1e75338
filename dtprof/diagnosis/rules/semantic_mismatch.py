"""Operations that match in form, and mean different things: ranks have other parameters, or resumed at other steps.

No operation shows that. What wrappers say of their parameters does, and how many steps optimizers had made before.
"""

from collections import Counter
from collections.abc import Iterator

import numpy as np

from dtprof.diagnosis.blocked_ranks import call_sites
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised, group_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rule import Declared, Rule, Stage
from dtprof.formatting import list_ranks, plural
from dtprof.job.group_collectives import at_position, checksum, group_tables
from dtprof.job.groups import GroupId
from dtprof.records.tables import Array, OptimizerAge, WrappedParameters

NEARLY_ALL = 0.9
"""Of the elements of an optimizer, reduced over a group in a step: then its members average these gradients."""
REDUCTIONS = ("all_reduce", "reduce_scatter")


def find_other_parameters(case: Case) -> Iterator[Finding]:
    """Give a finding for each wrapper whose parameters some members of its group order otherwise."""
    job = case.job
    wrapped: dict[tuple[GroupId, str, int], dict[int, WrappedParameters]] = {}
    for rank in job.ranks.values():
        names = {key.name: key for key in rank.groups}
        counted: Counter[tuple[str, str]] = Counter()
        for parameter in rank.wrapped_parameters:
            nth = counted[parameter.group, parameter.by]
            counted[parameter.group, parameter.by] += 1
            if parameter.group in names:
                wrapped.setdefault((names[parameter.group], parameter.by, nth), {})[rank.rank] = parameter
    for (group, _, _), here in wrapped.items():
        if len({parameters.names for parameters in here.values()}) > 1:
            yield _parameters_finding(job, group, here)
            return  # those inside of a wrapper, and after it, differ as well


def _parameters_finding(job: JobState, group: GroupId, here: dict[int, WrappedParameters]) -> Finding:
    counted = Counter(parameters.names for parameters in here.values())
    usual, most = counted.most_common(1)[0]
    is_tie = 2 * most <= len(here)
    culprits = tuple(sorted(rank for rank, parameters in here.items() if is_tie or parameters.names != usual))
    mine = here[culprits[0]]
    theirs = next(parameters for parameters in here.values() if parameters.names != mine.names)
    others = "another rank has" if is_tie else "they have"
    differs = next(
        (f"{a} where {others} {b}" for a, b in zip(mine.some, theirs.some, strict=False) if a != b),
        f"names after the first {len(mine.some)} differ",
    )
    known = job.group(group)
    sites = {rank: parameters.site for rank, parameters in here.items() if parameters.site is not None}
    order = "in orders that differ" if is_tie else "in another order than the others"
    return Finding(
        kind="step-mismatch",
        summary=f"{capitalised(culprits)} {'gives' if len(culprits) == 1 else 'give'} {mine.by} parameters {order}"
        f"{at_line(mine.site)}: {differs}. Operations over "
        f"{group_words(known)} match, and join different parameters: results are invalid.",
        culprit_ranks=culprits,
        grade=0.7 if is_tie else 0.9,
        group=known,
        call_sites={rank: site for rank, site in sites.items() if rank not in culprits},
        culprit_call_sites={rank: site for rank, site in sites.items() if rank in culprits},
        evidence=tuple(
            f"rank {rank}: {', '.join(parameters.some[:4])}, ..." for rank, parameters in sorted(here.items())[:8]
        ),
        advice=("Register modules in one order on all ranks: from a list or sorted names, never from a set.",),
    )


def find_other_start(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks whose optimizer had made other steps before than that of ranks they average with."""
    job = case.job
    for group, tables in group_tables(job.ranks).items():
        known = {rank: job.ranks[rank].optimizer_ages for rank in tables}
        for number in range(min((len(own) for own in known.values()), default=0)):
            ages = {rank: own[number] for rank, own in known.items()}
            alike = len({(age.parameters, age.elements) for age in ages.values()}) == 1
            if alike and len({age.steps for age in ages.values()}) > 1 and _averages(tables, ages):
                yield _start_finding(job, group, tables, ages)
                return


def _averages(tables: dict[int, Array], ages: dict[int, OptimizerAge]) -> bool:
    """Say whether the members reduce about as many elements in a step as the optimizer has."""
    reducing = [checksum(op) for op in REDUCTIONS]
    for rank, table in tables.items():
        rows = table[np.isin(table["op"], reducing)]
        if not len(rows):
            return False
        _, steps = np.unique(rows["step"], return_inverse=True)
        if np.bincount(steps, weights=rows["numel"]).max() < NEARLY_ALL * ages[rank].elements:
            return False
    return True


def _start_finding(job: JobState, group: GroupId, tables: dict[int, Array], ages: dict[int, OptimizerAge]) -> Finding:
    counted = Counter(age.steps for age in ages.values())
    usual, most = counted.most_common(1)[0]
    is_tie = 2 * most <= len(ages)
    culprits = tuple(sorted(rank for rank, age in ages.items() if age.steps != usual))
    if is_tie:  # of two halves that which had made fewer steps holds the older state, or none
        culprits = tuple(sorted(rank for rank, age in ages.items() if age.steps == min(counted)))
    theirs = next(age.steps for rank, age in ages.items() if rank not in culprits)
    first = at_position(job.ranks, tables, max(int(table["seq"][0]) for table in tables.values()))
    known = job.group(group)
    state = f"after {plural(ages[culprits[0]].steps, 'step')}"
    return Finding(
        kind="step-mismatch",
        summary=f"{capitalised(culprits)} {'resumes' if len(culprits) == 1 else 'resume'} "
        f"{state if ages[culprits[0]].steps else 'without the state of an optimizer'}, the others after "
        f"{plural(theirs, 'step')}: they average gradients over {group_words(known)}, and step differently.",
        culprit_ranks=culprits,
        grade=0.6 if is_tie else 0.85,
        group=known,
        op=next(iter(first.values())).op if first else None,
        call_sites=call_sites({rank: own for rank, own in first.items() if rank not in culprits}),
        culprit_call_sites=call_sites({rank: own for rank, own in first.items() if rank in culprits}),
        evidence=tuple(
            f"rank {rank}: its optimizer of {age.elements:,} elements had made {plural(age.steps, 'step')} before"
            for rank, age in sorted(ages.items())[:8]
        ),
        advice=(f"Load the checkpoint of one step on all ranks: compare what {list_ranks(culprits)} loaded.",),
    )


RULES: Declared = (
    Rule(kinds=("step-mismatch",), stages=(Stage.RISK,), find=find_other_parameters),
    Rule(kinds=("step-mismatch",), stages=(Stage.RISK,), find=find_other_start),
)
