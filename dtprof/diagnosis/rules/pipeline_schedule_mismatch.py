"""Stages of a pipeline run different schedules or numbers of microbatches."""

from collections import Counter
from collections.abc import Iterator

from dtprof.diagnosis.blocked_ranks import call_sites, fewest_steps, first_blocking_of, places_of, victims
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.findings import Finding, at_line, capitalised, explain, wait_words
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.rule import Declared, Refinement, Rule, Stage
from dtprof.formatting import plural
from dtprof.records.sites import Site


def _find_other_plans(job: JobState) -> Finding | None:
    """Return the finding for ranks of a pipeline whose schedules are not those of the others."""
    plans = _plans(job)
    if len(plans) < 2 or len(plans) < len(job.ranks) or len(set(plans.values())) < 2:
        return None
    words = {rank: f"{schedule} with {plural(number, 'microbatch')}" for rank, (schedule, number) in plans.items()}
    return _pipeline_finding(job, words)


def _plans(job: JobState) -> dict[int, tuple[str, int]]:
    """Return the schedule and the number of microbatches of each rank: of its newest step, else of its one schedule."""
    plans = {rank.rank: rank.passes[-1].plan if rank.passes else rank.only_pipeline for rank in job.ranks.values()}
    return {rank: (plan.schedule, plan.num_microbatches) for rank, plan in plans.items() if plan is not None}


def _find_other_calls(job: JobState) -> Finding | None:
    """Return the finding for stages that are in a step called at another line than that of most.

    Where most have come to that line, too, and are past it or not there yet: stages that never share lines say nothing.
    """
    calls: dict[int, Site] = {}
    for rank in job.ranks.values():
        now = rank.first_blocking
        if not rank.passes or now is None or not now.p2p or now.site is None:
            return None  # an evaluation is no step of the schedule, and leaves messages only
        calls[rank.rank] = now.site
    lines = {rank: (site.file, site.line) for rank, site in calls.items()}
    if len(set(lines.values())) < 2:
        return None
    usual, most = Counter(lines.values()).most_common(1)[0]
    others = set(lines.values()) - {usual}
    there = next(job.ranks[rank] for rank, line in lines.items() if line == usual)
    if 2 * most <= len(calls):
        return None
    if not others <= {(o.site.file, o.site.line) for o in there.operations if o.site is not None}:
        return None
    return _pipeline_finding(job, {rank: f"the step called{at_line(site)}" for rank, site in calls.items()})


def _find_fewer_steps(case: Case) -> Finding | None:
    """Return the finding for stages that have ended all their steps, and left the others in one more.

    They wait in a collective, as after the loop over steps, while the others wait for their messages.
    """
    job = case.job
    now = first_blocking_of(job, job.ranks)
    if len(now) < len(job.ranks) or not all(rank.passes for rank in job.ranks.values()):
        return None
    done = {rank for rank, o in now.items() if job.ranks[rank].passes[-1].ended and not o.p2p}
    inside = {rank for rank, o in now.items() if not job.ranks[rank].passes[-1].ended and o.p2p}
    are_awaited = any(done.intersection(wait.awaited) for wait in case.unmet_messages)
    made = {rank: job.ranks[rank].passes[-1].number for rank in now}
    if not are_awaited or done | inside != now.keys() or len(done) > len(inside) or min(made.values()) < 0:
        return None
    if max(made[rank] for rank in done) >= min(made[rank] for rank in inside):
        return None
    words = {rank: "fewer steps" if rank in done else "one more" for rank in now}
    return _pipeline_finding(job, words, culprits=tuple(sorted(done)))


def find_pipeline_mismatch(case: Case) -> Iterator[Finding]:
    """Give the finding for ranks of a pipeline whose plans, or numbers of steps or microbatches run, differ."""
    job = case.job
    if (other := _find_other_plans(job) or _find_other_calls(job) or _find_fewer_steps(case)) is not None:
        yield other
        return
    ranks = {rank.rank: rank for rank in job.ranks.values() if rank.passes}
    plans = _plans(job)
    if len(ranks) < 2 or len(ranks) < len(job.ranks):
        return
    ran = {}
    for rank, own in ranks.items():
        newest = next((pass_ for pass_ in reversed(own.passes) if pass_.ended), None)
        if newest is None or newest.plan is None:
            continue
        wanted = newest.plan.num_microbatches
        if any(number != wanted for number in newest.forwards.values()):
            ran[rank] = min(newest.forwards.values())
    if not ran or len(ran) == len(ranks):
        return
    words = {
        rank: plural(ran[rank], "microbatch")
        if rank in ran
        else plural(plans[rank][1], "microbatch")
        if rank in plans
        else "?"
        for rank in ranks
    }
    yield _pipeline_finding(job, words)


def explain_death(case: Case, death: Finding) -> Iterator[Finding]:
    """Give the finding for different plans where a rank died: it received a message that did not fit its plan."""
    if (other := _find_other_plans(case.job)) is not None:
        yield explain(other, death)


def _pipeline_finding(job: JobState, words: dict[int, str], *, culprits: tuple[int, ...] = ()) -> Finding:
    """Return the finding for ranks that run what these words say; without culprits, those that differ from most."""
    counted = list(words.values())
    usual = max(sorted(set(counted)), key=counted.count)
    if all(counted.count(value) == counted.count(usual) for value in counted):
        usual = max(counted, key=lambda text: [int(part) for part in text.split() if part.isdigit()])
    if culprits:
        usual = next(value for rank, value in words.items() if rank not in culprits)
    else:
        culprits = tuple(sorted(rank for rank, value in words.items() if value != usual))
    blocked = victims(job, set(culprits))
    operations = first_blocking_of(job, blocked)
    operation = next(iter(operations.values()), None)
    places = places_of(job.ranks[rank] for rank in culprits)
    runs = "runs" if len(culprits) == 1 else "run"
    return Finding(
        kind="pipeline-schedule-mismatch",
        summary=f"{capitalised(culprits)} of the pipeline {runs} {words[culprits[0]]}, the others {usual}; "
        f"{wait_words(blocked)} for messages that do not come.",
        culprit_ranks=culprits,
        waiting_ranks=blocked,
        grade=0.9,
        group=job.group(operation.group) if operation is not None and operation.group.ranks else None,
        op=operation.op if operation else None,
        seq=operation.seq if operation else None,
        step=fewest_steps(job.ranks[rank] for rank in words),
        call_sites=call_sites(operations),
        culprit_call_sites=places,
        evidence=tuple(f"rank {rank}: {value}" for rank, value in sorted(words.items())[:8]),
        advice=("Give every stage the same schedule and the same number of microbatches.",),
    )


KINDS = ("pipeline-schedule-mismatch",)
RULES: Declared = (
    Rule(kinds=KINDS, stages=(Stage.DIVERGENCE,), find=find_pipeline_mismatch),
    Refinement(kinds=KINDS, causes=("rank-crashed", "rank-killed"), stages=(Stage.DEATH,), refine=explain_death),
)
