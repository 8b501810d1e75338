"""The verdict in one sentence: what holds the job up most, or why that cannot be told."""

import shlex
from dataclasses import dataclass

from dtprof.analysis.results import PARTS, RankResult, Summary
from dtprof.figures.quantities import format_duration, format_share

NOTEWORTHY_SHARE = 0.10
"""A part of less than this share of the step is not worth the headline."""
_ENDED_WELL = ("finished", "running", "unknown")
_MAX_NAMED_RANKS = 4


@dataclass(frozen=True, kw_only=True)
class Headline:
    """What the page says first."""

    verdict: str  # "good", "attention", "bad", "unknown"
    sentence: str
    evidence: str | None  # the panel that shows it
    command: str | None  # what to type next


def mean_parts(summary: Summary) -> dict[str, float] | None:
    """Return the share of each part in the step, over all ranks whose step could be split; None without any."""
    known = [rank for rank in summary.ranks if rank.partition_ns and rank.step_ns]
    total = sum(rank.step_ns or 0 for rank in known)
    if not total:
        return None
    return {part: sum((rank.partition_ns or {}).get(part, 0) for rank in known) / total for part in PARTS}


def write_headline(summary: Summary) -> Headline:
    """Say what matters most: a job that ended badly, else where its time goes, else why that is not known."""
    failed = [rank for rank in summary.ranks if rank.ended not in _ENDED_WELL]
    diagnose = f"dtprof diagnose {shlex.quote(summary.run)}"
    if failed or summary.missing_ranks:
        return Headline(
            verdict="bad", sentence=_describe_end(failed, summary), evidence="measurement", command=diagnose
        )
    shares = mean_parts(summary)
    if shares is None:
        why = summary.cannot_tell[0] if summary.cannot_tell else "no step could be split into its parts."
        return Headline(
            verdict="unknown",
            sentence=f"Cannot tell where the time goes: {why}",
            evidence="cannot_tell",
            command=diagnose,
        )
    return _describe_time(summary, shares)


def _describe_end(failed: list[RankResult], summary: Summary) -> str:
    said = [f"rank {rank.rank} {_past(rank.ended)}" for rank in failed[:_MAX_NAMED_RANKS]]
    if len(failed) > _MAX_NAMED_RANKS:
        said.append(f"{len(failed) - _MAX_NAMED_RANKS} more ranks failed")
    if summary.missing_ranks:
        named = ", ".join(map(str, summary.missing_ranks[:_MAX_NAMED_RANKS]))
        rest = len(summary.missing_ranks) - _MAX_NAMED_RANKS
        more = f" and {rest} more" if rest > 0 else ""
        said.append(f"rank{'s' if len(summary.missing_ranks) > 1 else ''} {named}{more} left no records")
    start = "The job did not end well" if failed else "The run is not whole"
    return f"{start}: {', '.join(said)}."


def _past(ended: str) -> str:
    return f"was {ended}" if ended.startswith("killed") else ended


def _describe_time(summary: Summary, shares: dict[str, float]) -> Headline:
    run = shlex.quote(summary.run)
    summarise, diagnose = f"dtprof summary {run}", f"dtprof diagnose {run}"
    step = format_duration(summary.steps.duration_ns.median) if summary.steps.duration_ns else None
    of_a_step = f"of a step of {step}" if step else "of a step"
    part = max((name for name in PARTS if name not in ("compute", "optimizer")), key=lambda name: shares[name])
    who = "The rank spends" if len(summary.ranks) == 1 else "Ranks spend"
    if shares[part] < NOTEWORTHY_SHARE:
        work = shares["compute"] + shares["optimizer"]
        return Headline(
            verdict="good",
            sentence=f"{who} {format_share(work)} {of_a_step} computing; nothing else takes more than "
            f"{format_share(shares[part])}.",
            evidence="step_parts",
            command=summarise,
        )
    what, evidence = _PART_WORDS[part]
    sentence = f"{who} {format_share(shares[part])} {of_a_step} {what}"
    if part == "exposed_wait":
        sentence += _name_straggler(summary)
    if part == "exposed_transfer":
        sentence += _name_collective(summary)
    return Headline(
        verdict="attention",
        sentence=sentence + ".",
        evidence=evidence,
        command=diagnose if part in ("exposed_wait", "idle") else summarise,
    )


_PART_WORDS = {
    "exposed_wait": ("waiting for others", "stragglers"),
    "exposed_transfer": ("moving data that no work hides", "collectives"),
    "bubble": ("in pipeline bubbles", "step_parts"),
    "data": ("waiting for data", "step_parts"),
    "checkpoint": ("writing checkpoints", "step_parts"),
    "host": ("in host work outside every known phase", "step_parts"),
    "idle": ("idle", "step_parts"),
}


def _name_straggler(summary: Summary) -> str:
    if not summary.stragglers:
        return "; no rank is late more often than the others"
    worst = max(summary.stragglers, key=lambda straggler: straggler.blame_ns_per_step or 0)
    return f"; rank {worst.rank} arrives last in {format_share(worst.last_share)} of the collectives waited in"


def _name_collective(summary: Summary) -> str:
    known = [one for one in summary.collectives if one.exposed_ns]
    if not known:
        return ""
    worst = max(known, key=lambda one: (one.exposed_ns or 0) * one.count)
    return f"; {worst.op} of group {worst.group} is the most of it"
