"""The summary of a run to an experiment tracker: one call, in the job or after it.

In the job nothing here may end the training: what goes wrong is said once on stderr, and False is returned.
"""

import os
import re
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import ModuleType

from dtprof.analysis.metric_registry import JOB
from dtprof.analysis.results import Summary
from dtprof.errors import MissingDependencyError, UsageError
from dtprof.fence import fenced
from dtprof.job.axes import axis_sizes
from dtprof.settings import ENV_RUN_DIR

TRACKERS = ("wandb", "mlflow")


def log_to(tracker: str, run: str | os.PathLike[str] | None = None) -> bool:
    """Log the summary of a run to the tracker's active run; say whether that was done.

    Parameters:
        tracker: "wandb" or "mlflow". It must be installed, and its run must have been started.
        run: run directory; None: the run that records this process. Then call it on one rank, after the training: what
            the other ranks have recorded by then is in it.

    Raises:
        UsageError: `run` is given, and there is no such tracker, or it has no active run.
        MissingDependencyError: `run` is given, and the tracker is not installed.
        NotARunError: `run` is given and cannot be read.
        Exception: `run` is given, and the tracker raises it.
    """
    if run is not None:
        return _log(tracker, Path(run))
    recorded = os.environ.get(ENV_RUN_DIR)
    if not recorded:
        return False  # the program runs without dtprof
    return fenced("dtprof.log_to", "did not log the summary")(_log)(tracker, Path(recorded)) is True


def _log(tracker: str, path: Path) -> bool:
    if tracker not in TRACKERS:
        raise UsageError(f"there is no tracker {tracker!r}; expected one of {', '.join(TRACKERS)}")
    try:
        module = import_module(tracker)
    except ImportError as error:
        raise MissingDependencyError(f"{tracker} is not installed; pip install {tracker}") from error
    from dtprof.api import open_run

    summary = open_run(path).summary()
    if tracker == "wandb":
        _to_wandb(module, summary)
    else:
        _to_mlflow(module, summary)
    return True


def _to_wandb(wandb: ModuleType, summary: Summary) -> None:
    if wandb.run is None:
        raise UsageError("wandb has no active run; call wandb.init() first")
    wandb.run.config.update(describe(summary), allow_val_change=True)
    for name, value in measure(summary).items():
        wandb.run.summary[name] = value


def _to_mlflow(mlflow: ModuleType, summary: Summary) -> None:
    active = mlflow.active_run()
    if active is None:
        raise UsageError("mlflow has no active run; call mlflow.start_run() first")
    mlflow.log_metrics(measure(summary))
    layout = describe(summary)
    mlflow.set_tags(layout)
    # A job that was restarted may go on with its run of MLflow, which refuses to change a parameter.
    known = mlflow.get_run(active.info.run_id).data.params
    mlflow.log_params({name: value for name, value in layout.items() if name not in known})


def measure(summary: Summary) -> dict[str, float]:
    """Return the figures by name: times in ms, sizes in bytes, shares from 0 to 1; unknown figures are omitted."""
    figures = {metric.tracker: metric.tracked(summary) for metric in JOB if metric.tracker}
    figures |= {f"share/{part}": share for part, share in (summary.part_shares or {}).items()}
    return {f"dtprof/{name}": float(value) for name, value in figures.items() if value is not None}


def describe(summary: Summary) -> Mapping[str, str | int]:
    """Return the description of the run: its layout and the path of its records."""
    layout: dict[str, str | int] = {"world_size": summary.world_size, "hosts": len(summary.hosts), "run": summary.run}
    sizes = axis_sizes((group.axis, len(group.ranks)) for group in summary.groups)
    layout |= {re.sub(r"[^\w.-]", "_", f"size_{axis}"): size for axis, size in sizes.items()}
    layout |= {"backend": summary.backend} if summary.backend else {}
    if summary.pipeline is not None:
        layout |= {"schedule": summary.pipeline.schedule, "microbatches": summary.pipeline.microbatches}
    return {f"dtprof/{name}": value for name, value in layout.items()}
