"""Ask the rules in the order of their stages, one independent cause after the other, and form the verdict."""

from dataclasses import replace

from dtprof.diagnosis.blocked_ranks import is_refused, raised_by
from dtprof.diagnosis.case import Case
from dtprof.diagnosis.common_callers import with_common_callers
from dtprof.diagnosis.divergence.call_divergence import name_callers
from dtprof.diagnosis.explained_waits import (
    find_conflicting_waits,
    find_explained,
    find_independent_crashes,
    find_unexplained_waits,
)
from dtprof.diagnosis.findings import Finding, Verdict, explain
from dtprof.diagnosis.job_state import JobState
from dtprof.diagnosis.measured_rates import RATES, Rates, with_measured_rate
from dtprof.diagnosis.outcome import assess_outcome, words_on_lost, words_on_source, words_on_unexplained
from dtprof.diagnosis.rule import Stage
from dtprof.diagnosis.rules import REFINEMENTS, RULES
from dtprof.diagnosis.rules.collective_in_except import explain_by_handlers
from dtprof.job.issued_operations import Operation

LAST = (Stage.NAMED, Stage.SUSPICION)


def decide(job: JobState, rates: Rates = RATES) -> Verdict:
    """Return the verdict: the cause that ended or blocks the job, else the risks of a job that goes well.

    Parameters:
        rates: how often findings are right by their class of evidence; without them they have the grades of rules.
    """
    job = with_common_callers(job)
    case = Case(job)
    findings, unexplained = _find_causes(case)
    # A risk is worth a line only in a job that nothing ended or blocks.
    if not findings and job.ranks and not job.stalled:
        findings = _find_risks(case)
    elif findings and findings[0].kind == "rank-crashed":
        findings += _find_all(case, Stage.BESIDE_CRASH)
    elif findings and job.stalled:
        # A hang hides faults of other groups that completed before it; those that it explains are known already.
        known = {(finding.kind, finding.group, finding.seq) for finding in findings}
        beside = _find_all(case, Stage.BESIDE_HANG)
        findings += [finding for finding in beside if (finding.kind, finding.group, finding.seq) not in known]
    left_open = () if findings else tuple(text for rule in RULES for text in rule.leave_open(case))
    # The outcome comes before the findings of the whole job, which hold in a sound one as well.
    outcome, reasons = assess_outcome(job, findings, left_open)
    beside = _find_all(case, Stage.WHOLE_JOB)
    findings = [*findings, *beside]
    if outcome in ("healthy", "slow") and any(finding.severity != "info" for finding in beside):
        outcome = "risk"
    return Verdict(
        outcome=outcome,
        source=job.sources,
        ranks_seen=tuple(sorted(job.ranks)),
        ranks_missing=job.missing,
        findings=tuple(
            with_measured_rate(
                replace(name_callers(job, explain_by_handlers(job, finding)), culprit_hosts=_hosts_of(finding, job)),
                job.sources,
                rates,
            )
            for finding in findings
        ),
        cannot_tell=(
            *reasons,
            *(text for finding in findings for text in finding.leaves_open),
            *job.problems,
            *words_on_lost(job, findings),
            *words_on_source(job, findings),
            *words_on_unexplained(job, unexplained),
        ),
    )


def _hosts_of(finding: Finding, job: JobState) -> tuple[str, ...]:
    """Return the hosts of the culprits, or those that a rule names; none in a job of one host."""
    if finding.culprit_hosts:
        return finding.culprit_hosts
    if len({rank.host for rank in job.ranks.values() if rank.host}) < 2:
        return ()
    hosts = (job.ranks[rank].host for rank in finding.culprit_ranks if rank in job.ranks)
    return tuple(sorted({host for host in hosts if host}))


def _find_causes(whole: Case) -> tuple[list[Finding], dict[int, Operation]]:
    """Return a finding for each independent fault, and the operations of waiting ranks that none explains.

    What waits for a rank of a finding is a consequence of it. To what the first cause leaves unexplained the rules are
    applied again, without the ranks that it explains.
    """
    causes: list[tuple[Finding, set[int]]] = []
    others: list[Finding] = []
    case, unexplained, to_explain = whole, dict[int, Operation](), set(whole.job.ranks)
    while first := _find_first_cause(case):
        cause = first[0]
        explained = find_explained(case.job, cause) & case.job.ranks.keys()
        # A later cause counts where it explains what is left: a rule may see other faults with fewer ranks to compare.
        if causes and not (explained and {*cause.culprit_ranks, *cause.waiting_ranks} & to_explain):
            break
        causes.append((cause, explained))
        others = [other for other in others if (other.kind, other.culprit_ranks) != (cause.kind, cause.culprit_ranks)]
        others += first[1:]
        case = Case(case.job.without(explained.union(cause.culprit_ranks)))
        unexplained = find_unexplained_waits(case.job)
        to_explain = set(unexplained) | find_conflicting_waits(case.job)
        to_explain |= find_independent_crashes(case.job, causes[0][0], whole.job)
        if not to_explain:
            break
    if len(causes) == 1:
        return [causes[0][0], *others], unexplained
    causes.sort(key=lambda cause: cause[0].severity != "error")  # work that may yet end, after what never does
    return [*(_limit(cause, explained) for cause, explained in causes), *others], unexplained


def _limit(cause: Finding, explained: set[int]) -> Finding:
    """Return a finding with the waiting ranks that it explains only: others wait for another cause."""
    return replace(
        cause,
        waiting_ranks=tuple(rank for rank in cause.waiting_ranks if rank in explained),
        call_sites={rank: site for rank, site in cause.call_sites.items() if rank in explained},
    )


def _find_first_cause(case: Case) -> list[Finding]:
    """Return the most probable cause, and the findings made together with it; empty where no rule applies.

    Which stages are asked is no matter of order alone: each branch says what its evidence allows.
    """
    if case.job.sources == ("log",) and (named := _find_first(case, Stage.NAMED)):
        return named
    death = _find_first(case, Stage.DEATH)
    if death and not _died_in_operation(case.job, death[0]) and not _took_wrong_data(case, death[0]):
        return death
    if ended := death or _find_first(case, Stage.ABORT):
        # A backend raises in, or aborts, the process that receives what does not fit, or gives it what means nothing.
        broken = _find_first(case, Stage.DIVERGENCE, Stage.BROKEN_MESSAGE)
        return [explain(broken[0], ended[0])] if broken else ended
    if case.job.stalled or case.awaited_leavers:
        return _find_first(case, Stage.DIVERGENCE, Stage.WAIT, Stage.STALL, Stage.LATE, *LAST)
    # No rank is blocked: open operations mean nothing. How ranks exited matters where the job failed.
    failed = case.job.manifest.exit_status not in (None, 0)
    return _find_first(case, Stage.LATE, *LAST) if failed else _find_first(case, *LAST)


def _died_in_operation(job: JobState, death: Finding) -> bool:
    """Say whether ranks exited out of the operations they were in, whose arguments were accepted."""
    ranks = [job.ranks.get(rank) for rank in death.culprit_ranks]
    return bool(ranks) and all(rank is not None and raised_by(rank) and not is_refused(rank) for rank in ranks)


def _took_wrong_data(case: Case, death: Finding) -> bool:
    """Say whether ranks went on, and died, with what an operation gave them that fitted no call of the others.

    These wait in it, or failed. In a handler a rank makes calls of its own because it had raised.
    """
    for found in case.disagreements.values():
        own = [found.operations.get(rank) for rank in death.culprit_ranks]
        places = [case.job.place_in_source(operation.site) for operation in own if operation is not None]
        if (
            found.argument in ("dtype", "numel")
            and all(operation is not None and operation.done for operation in own)
            and not all(operation.done for operation in found.operations.values())
            and not any(place is not None and place.handler is not None for place in places)
        ):
            return True
    return False


def _find_first(case: Case, *stages: Stage) -> list[Finding]:
    """Return the first finding, refined, of the first rule that applies in these stages."""
    for stage in stages:
        for rule in RULES:
            found = iter(rule.find(case) if stage in rule.stages else ())
            if (cause := next(found, None)) is not None:
                return [*_refine(case, stage, cause), *(found if rule.finds_all else ())]
    return []


def _refine(case: Case, stage: Stage, cause: Finding) -> list[Finding]:
    """Return the deepest cause that refinements reach: the cause itself where none applies."""
    causes = [cause]
    for refinement in REFINEMENTS:
        if stage in refinement.stages and causes[0].kind in refinement.causes:
            causes = [*refinement.refine(case, causes[0])] or causes
    return causes


def _find_all(case: Case, stage: Stage) -> list[Finding]:
    return [finding for rule in RULES if stage in rule.stages for finding in case.findings(rule.find)]


def _find_risks(case: Case) -> list[Finding]:
    """Find faults and risks of a job that ended in order or goes on."""
    mispaired = next(
        (found for rule in RULES if Stage.MISPAIRED in rule.stages if (found := case.findings(rule.find))), ()
    )
    groups = [finding.group for finding in mispaired]
    notes = [note for note in _find_all(case, Stage.NOTE) if note.group not in groups]
    risks = [cause for risk in _find_all(case, Stage.RISK) for cause in _refine(case, Stage.RISK, risk)]
    return [*mispaired, *risks, *notes]
