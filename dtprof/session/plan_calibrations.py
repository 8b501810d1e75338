"""The file of a cluster in which `dtprof plan --calibration` keeps the figures of its runs."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dtprof.analysis.planning.run_calibration import MeasuredRun
from dtprof.errors import OutputError, UsageError
from dtprof.records import writer

SCHEMA = 1
MOST_KEPT = 64
"""Runs; of more the newest."""
OF_CLUSTER = ("flops_per_s", "link_bytes_per_s", "network_bytes_per_s", "other_bytes")
"""Figures that say something about other models on the cluster, too."""


def read_runs(file: Path) -> list[MeasuredRun]:
    """Return the runs that a file keeps, oldest first; none where there is no file.

    Raises:
        UsageError: it is no such file, or its values cannot be.
    """
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(f"{file} cannot be read ({error.strerror}); expected a file of --calibration") from error
    except ValueError as error:
        raise _no_calibration(file, "it is no JSON") from error
    rows = document.get("runs") if isinstance(document, dict) and document.get("schema") == SCHEMA else None
    if not isinstance(rows, list):
        raise _no_calibration(file, f"it has no runs of schema {SCHEMA}")
    return [_parse(file, row) for row in rows]


def _parse(file: Path, row: object) -> MeasuredRun:
    if not isinstance(row, dict) or not isinstance(row.get("run"), str):
        raise _no_calibration(file, "a run has no path")
    figures: dict[str, float | None] = {}
    for name in OF_CLUSTER:
        value = row.get(name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if value is not None and not (is_number and value >= 0):
            raise _no_calibration(file, f"{name} of {row['run']} is {value!r}, no number of 0 or more")
        figures[name] = value
    return MeasuredRun(
        run=row["run"],
        flops_per_s=figures["flops_per_s"],
        link_bytes_per_s=figures["link_bytes_per_s"],
        network_bytes_per_s=figures["network_bytes_per_s"],
        other_bytes=figures["other_bytes"],
    )


def _no_calibration(file: Path, why: str) -> UsageError:
    return UsageError(
        f"{file} is no file of --calibration: {why}; expected a new file, or one that dtprof plan --calibration wrote"
    )


def keep_runs(file: Path, known: Sequence[MeasuredRun], measured: Sequence[MeasuredRun]) -> None:
    """Write the figures of runs beside those that are known; a run that was measured again replaces itself.

    Raises:
        OutputError: the file cannot be written.
    """
    newest = {run.run for run in measured}
    rows = [*(run for run in known if run.run not in newest), *measured][-MOST_KEPT:]
    plain = [{"run": run.run} | {name: asdict(run)[name] for name in OF_CLUSTER} for run in rows]
    try:
        writer.write_json(file, {"schema": SCHEMA, "runs": plain})
    except OSError as error:
        raise OutputError(f"{file} cannot be written ({error.strerror}); give another with --calibration") from error
