"""Runs as lines of a table on a terminal."""

import time
from collections.abc import Mapping, Sequence

from dtprof.formatting import UNKNOWN, format_bytes, format_count, format_ns, format_table, join_lines, plural, shorten
from dtprof.records.run_facts import RunFacts
from dtprof.report.text.labelled_lines import wrap_text

MOST_NAME = 48
QUIET = ("running", "ended", "healthy")
"""Outcomes that need no attention."""


def runs_text(runs: Sequence[RunFacts], *, with_steps: bool = False) -> str:
    """Return a table of runs; below it the verdicts of those that need attention.

    Parameters:
        with_steps: with the median step of each and its change against the run of the same command before.
    """
    if not runs:
        return "no run matches; record one with dtprof run -- COMMAND"
    changes = step_changes(runs) if with_steps else {}
    users = len({run.user for run in runs}) > 1
    head = ["started", "run", *(["user"] if users else []), "outcome", "ranks", "hosts", "took", "size"]
    rows = [head + (["step", "change"] if with_steps else [])]
    for run in runs:
        row = [
            _date(run.started_ns),
            shorten(run.name, MOST_NAME),
            *([run.user] if users else []),
            run.outcome,
            format_count(run.num_ranks),
            _hosts(run.hosts),
            _duration(run.took_ns),
            format_bytes(run.nbytes),
        ]
        if with_steps:
            change = changes.get(run.name)
            row += [format_ns(run.step_ns), UNKNOWN if change is None else f"{100 * change:+.1f} %"]
        rows.append(row)
    lines = format_table(rows, left=4 if users else 3)
    notable = [run for run in runs if run.summary and run.outcome not in QUIET]
    if notable:
        lines.append("")
        for run in notable:
            sentence = f"{shorten(run.name, MOST_NAME)}: {run.summary}"
            lines += wrap_text(sentence, indent="  ", break_long_words=False)
    lines += ["", _totals(runs)]
    return join_lines(lines)


def step_changes(runs: Sequence[RunFacts]) -> Mapping[str, float]:
    """Return by name how much longer a step takes than in the run before of the same user, command and ranks."""
    before: dict[tuple[str, str, int], float] = {}
    changes = {}
    for run in sorted(runs, key=lambda run: run.started_ns):
        if run.step_ns is None:
            continue
        key = (run.user, run.command, run.num_ranks)
        if key in before:
            changes[run.name] = run.step_ns / before[key] - 1
        before[key] = run.step_ns
    return changes


def _totals(runs: Sequence[RunFacts]) -> str:
    counts = {outcome: sum(run.outcome == outcome for run in runs) for outcome in {run.outcome for run in runs}}
    listed = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items(), key=lambda item: -item[1]))
    return f"{plural(len(runs), 'run')}, {format_bytes(sum(run.nbytes for run in runs))}: {listed}"


def _hosts(hosts: Sequence[str]) -> str:
    if not hosts:
        return UNKNOWN
    return hosts[0] if len(hosts) == 1 else f"{hosts[0]} +{len(hosts) - 1}"


def _date(t_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(t_ns / 1e9)) if t_ns else UNKNOWN


def _duration(ns: int | None) -> str:
    if ns is None:
        return UNKNOWN
    if ns < 1e9:
        return "<1 s"
    seconds = round(ns / 1e9)
    hours, minutes = seconds // 3600, seconds % 3600 // 60
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {seconds % 60:02d} s" if minutes else f"{seconds} s"
