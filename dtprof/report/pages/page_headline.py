"""The verdict in one sentence: the largest cost of the job, or why it is unknown."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dtprof.analysis.communication.axis_collectives import collectives_by_axis
from dtprof.analysis.results import RankResult, Summary
from dtprof.analysis.whatif.prediction import NO_GAIN
from dtprof.diagnosis.findings import Verdict
from dtprof.formatting import plural
from dtprof.report.figures.figure_numbers import format_duration, format_share
from dtprof.report.text.summary_text import group_words
from dtprof.report.wording import advice_words, hot_line_words

NOTEWORTHY_SHARE = 0.10
"""A part of less than this share of the step is not worth the headline."""
MOST = 0.7
"""Wait or transfer alone is named where it is at least this share of the exposed communication."""
BROKEN = {"hang": "Hang", "crash": "Crash"}
"""Outcomes of the diagnosis that come before everything else."""
_MAX_NAMED_RANKS = 4
_LOSSES = {
    "bubble": "in pipeline bubbles",
    "data": "waiting for data",
    "checkpoint": "writing checkpoints",
    "host": "in host work outside every known phase",
    "idle": "idle",
}
"""Parts of a step that are no work, and the activity of a rank in them."""
_WITH_LINES = ("data", "host")
"""Those in which the program's own lines run: a loader without workers reads in the main thread."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The headline of a page."""

    verdict: str  # "good", "attention", "bad", "unknown"
    label: str
    sentence: str
    advice: str = ""
    evidence: str | None = None  # the panel that shows it
    command: str | None = None  # what to type next


def write_headline(summary: Summary, verdict: Verdict | None = None) -> Headline:
    """Return the headline: a hang or bad exit, else the largest cost of the job, else why it is not known."""
    if verdict is not None and verdict.outcome in BROKEN and verdict.findings:
        return _describe_finding(verdict, summary)
    failed = [rank for rank in summary.ranks if rank.ended.failed]
    if failed or summary.missing_ranks:
        return _describe_end(failed, summary)
    known = summary.part_shares
    if known is None:
        return _describe_caveat(summary)
    shares = {part: share for part, share in known.items() if share is not None}
    losses = {part: shares[part] for part in _LOSSES if part in shares}
    losses["communication"] = summary.exposed_share or 0.0
    largest = max(losses, key=losses.__getitem__)
    if losses[largest] < NOTEWORTHY_SHARE:
        return Headline(
            verdict="good",
            label="Healthy",
            sentence=f"{_who_spends(summary, shares['compute'] + shares['optimizer'])} computing (forward, "
            f"backward, optimizer); nothing else takes more than {format_share(losses[largest])}.",
            advice=_advise(summary),
            evidence="step_parts",
        )
    if largest == "communication":
        return _describe_communication(summary, shares)
    line = f"; {hot_line_words(summary.hot_lines[0])}" if largest in _WITH_LINES and summary.hot_lines else ""
    return Headline(
        verdict="attention",
        label="Attention",
        sentence=f"{_who_spends(summary, losses[largest])} {_LOSSES[largest]}{line}.",
        advice=_advise(summary),
        evidence="bubble_parts" if largest == "bubble" else "step_parts",
    )


def _describe_finding(verdict: Verdict, summary: Summary) -> Headline:
    first = verdict.findings[0]
    return Headline(
        verdict="bad",
        label=BROKEN[verdict.outcome],
        sentence=first.summary[:1].upper() + first.summary[1:].rstrip(".") + ".",
        advice=first.advice[0] if first.advice else "",
        evidence="findings",
        command=f"dtprof diagnose {shlex.quote(summary.run)}",
    )


def _who_spends(summary: Summary, share: float) -> str:
    who = "The rank spends" if len(summary.ranks) == 1 else "Ranks spend"
    length = f" of {format_duration(summary.steps.duration_ns.median)}" if summary.steps.duration_ns else ""
    return f"{who} {format_share(share)} of a step{length}"


def _describe_end(failed: list[RankResult], summary: Summary) -> Headline:
    """Name first who ended by itself: those stopped by SIGTERM followed."""
    stopped = [rank for rank in failed if rank.ended.was_stopped]
    causes = [rank for rank in failed if not rank.ended.was_stopped]
    said = [f"rank {rank.rank} {rank.ended.clause()}" for rank in causes[:_MAX_NAMED_RANKS]]
    if len(causes) > _MAX_NAMED_RANKS:
        said.append(f"{plural(len(causes) - _MAX_NAMED_RANKS, 'more rank')} failed")
    if stopped:
        said.append(f"{_name_ranks([rank.rank for rank in stopped])} stopped by SIGTERM")
    if summary.lost_ranks:
        said.append(f"{_name_ranks(summary.lost_ranks)} left no records")
    if summary.left_out_ranks:
        said.append(f"{_name_ranks(summary.left_out_ranks)} took no part in the last attempt")
    start = "The job did not end well" if failed else "The run is not whole"
    return Headline(
        verdict="bad",
        label="Failed" if failed else "Incomplete",
        sentence=f"{start}: {', '.join(said)}.",
        evidence="measurement",
        command=f"dtprof diagnose {shlex.quote(summary.run)}",
    )


def _name_ranks(ranks: Sequence[int]) -> str:
    named = ", ".join(map(str, ranks[:_MAX_NAMED_RANKS]))
    rest = len(ranks) - _MAX_NAMED_RANKS
    return f"rank{'' if len(ranks) == 1 else 's'} {named}" + (f" and {rest} more" if rest > 0 else "")


def _describe_caveat(summary: Summary) -> Headline:
    telling = summary.reasons("steps" if summary.ranks else "run")
    others = [caveat.reason for caveat in summary.cannot_tell]
    why = next(iter([*telling, *others]), "no step could be split into its parts").rstrip(".")
    return Headline(
        verdict="unknown",
        label="Cannot tell",
        sentence=f"Cannot tell where the time goes: {why}.",
        evidence="cannot_tell",
        command=f"dtprof diagnose {shlex.quote(summary.run)}",
    )


def _describe_communication(summary: Summary, shares: Mapping[str, float]) -> Headline:
    wait, transfer = shares["exposed_wait"], shares["exposed_transfer"]
    worst = summary.worst_straggler
    if worst is None:
        late = "for which rank is not known" if summary.stragglers is None else "no rank holds the others up"
    else:
        late = f"rank {worst.rank} is to blame in {format_share(worst.last_share)} of the steps waited in"
    if wait >= MOST * (wait + transfer):
        sentence = f"{_who_spends(summary, wait)} waiting for others; {late}."
        evidence = "timeline" if worst is None else "stragglers"
    elif transfer >= MOST * (wait + transfer):
        sentence = f"{_who_spends(summary, transfer)} moving data that no work hides{_name_busiest(summary)}."
        evidence = "collectives"
    else:
        sentence = (
            f"{_who_spends(summary, wait + transfer)} blocked by communication: {format_share(wait)} waiting for "
            f"others, {format_share(transfer)} moving data; {late}."
        )
        evidence = "step_parts"
    return Headline(
        verdict="attention", label="Attention", sentence=sentence, advice=_advise(summary), evidence=evidence
    )


def _advise(summary: Summary) -> str:
    """Return the change that was predicted to gain most, or why none is named; nothing where none was asked for."""
    if summary.advice is None:
        return ""
    reason = summary.advice.reason
    said = reason if reason == NO_GAIN else f"no change is named: {reason}" if reason else advice_words(summary)
    return said[:1].upper() + said[1:].rstrip(".") + "."


def _name_busiest(summary: Summary) -> str:
    busiest = next((row for row in collectives_by_axis(summary) if row.exposed_ns), None)
    return f"; most of it is {busiest.op} over {group_words(busiest)}" if busiest is not None else ""
