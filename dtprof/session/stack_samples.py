"""Stacks of all ranks: sampled now where the job runs on this host, else those that `dtprof run` stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtprof.diagnosis.findings import capitalised
from dtprof.diagnosis.stack_groups import RankStack, read_stacks
from dtprof.errors import UsageError
from dtprof.records import writer
from dtprof.records.rank_processes import find_processes
from dtprof.session.engines import IN_THIS_PROCESS, open_run
from dtprof.session.process_liveness import is_alive


@dataclass(frozen=True, kw_only=True)
class StackSamples:
    """The stacks of the ranks, and when they were taken."""

    stacks: list[RankStack]
    taken: str  # now, kept
    t_ns: int | None
    notes: list[str]  # which ranks are missing, a sentence each


def read_or_sample(path: Path, *, native: bool = False, stored_only: bool = False) -> StackSamples:
    """Sample the stacks of the ranks that run on this host; where none does, read those stored in the run.

    Parameters:
        native: include frames of C and C++ code.
        stored_only: do not sample.

    Raises:
        NotARunError: the path holds no run that can be read.
        UsageError: there is no stack.
    """
    run = open_run(path, IN_THIS_PROCESS)
    processes = find_processes(run.folders)
    boot_id = writer.boot_id()
    alive = {p.pid: p.rank for p in processes if p.boot_id == boot_id and is_alive(p.pid, run.path)}
    if alive and not stored_only:
        from dtprof.launch.stack_sampler import sample

        document, taken = sample(alive, None, native=native), "now"
        stacks = read_stacks(document, alive)
    else:
        document, taken = run.exit_records.all_stacks(), "kept"
        stacks = [
            stack for p in processes for stack in read_stacks(run.exit_records.stacks_of(p.host), {p.pid: p.rank})
        ]
    if not stacks:
        raise UsageError(_nothing(run.name, len(processes), stored_only=stored_only))
    missing = sorted({process.rank for process in processes} - {stack.rank for stack in stacks})
    return StackSamples(stacks=stacks, taken=taken, t_ns=document.get("t_ns"), notes=_notes(missing, taken, path))


def _nothing(name: str, num_ranks: int, *, stored_only: bool) -> str:
    if not num_ranks:
        return f"{name} holds no log of any rank; expected a run in which ranks have started"
    where = (
        "no stacks were kept in it" if stored_only else "no rank of it runs on this host, and no stacks were kept in it"
    )
    return (
        f"{name}: {where}; `dtprof run --hang-after SECONDS` keeps them where a job makes no progress, and "
        "`dtprof stacks` takes them while the job runs"
    )


def _notes(missing: Sequence[int], taken: str, path: Path) -> list[str]:
    notes = []
    if taken == "kept":
        notes.append("These stacks were sampled when the job last stalled.")
    if missing:
        notes.append(
            f"{capitalised(list(missing))}: ended, or on another host; there, `dtprof stacks {path}` shows them."
        )
    return notes
