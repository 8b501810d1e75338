"""Join the runs that the launchers of one job have written on its nodes."""

from collections.abc import Sequence
from pathlib import Path

from dtprof.launch import run_gathering
from dtprof.launch.run_gathering import Gathered
from dtprof.records.reader import Run
from dtprof.session.engines import IN_THIS_PROCESS, open_run


def gather_folders(folders: Sequence[Path], output: Path, *, force: bool) -> Gathered:
    """Join run directories into `output`; return the missing parts.

    Raises:
        NotARunError: a folder holds no run that can be read.
        UsageError: they are not of one job.
        OutputError: the output is taken or cannot be written.
    """
    return gather_runs([open_run(folder, IN_THIS_PROCESS) for folder in folders], output, force=force)


def gather_runs(runs: Sequence[Run], output: Path, *, force: bool) -> Gathered:
    """Join runs that are open, as `gather_folders` does."""
    return run_gathering.gather([run_gathering.read_node_run(run) for run in runs], output, force=force)
