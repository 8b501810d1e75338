"""Lists of runs as JSON, schema 1."""

from collections.abc import Sequence
from typing import Any

from dtprof.records.run_facts import RunFacts
from dtprof.report.text.runs_text import step_changes

SCHEMA = 1


def runs_json(runs: Sequence[RunFacts], *, problems: Sequence[str] = ()) -> dict[str, Any]:
    """Return the document that `dtprof runs --json` prints; what is not known is null."""
    changes = step_changes(runs)
    return {
        "schema": SCHEMA,
        "runs": [
            {
                "name": run.name,
                "user": run.user,
                "hosts": list(run.hosts),
                "command": run.command,
                "started_realtime_ns": run.started_ns or None,
                "ended_realtime_ns": run.ended_ns or None,
                "took_ns": run.took_ns,
                "exit_status": run.exit_status,
                "ranks": run.num_ranks,
                "outcome": run.outcome,
                "summary": run.summary or None,
                "bytes": run.nbytes,
                "step_ns": run.step_ns,
                "step_change": changes.get(run.name),
            }
            for run in runs
        ],
        "cannot_tell": list(problems),
    }
