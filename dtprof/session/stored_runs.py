"""Lists of runs: chosen from the index; diagnosed, measured or removed where that is asked for."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof.errors import DtprofError
from dtprof.records import paths, run_facts
from dtprof.records.manifest import read_document, read_manifest
from dtprof.records.run_facts import RunFacts
from dtprof.session.run_index import RunFilter, RunIndex

if TYPE_CHECKING:
    from dtprof.diagnosis.findings import Verdict
    from dtprof.session.run_retention import Policy

UNDIAGNOSED = frozenset({run_facts.ENDED, run_facts.CUT_OFF, run_facts.UNKNOWN, run_facts.ENDED_BY_SIGNAL})


@contextmanager
def open_index(store: Path) -> Iterator[RunIndex]:
    """Open the index of a folder of runs; raise as `RunIndex`."""
    index = RunIndex(store)
    try:
        yield index
    finally:
        index.close()


def list_runs(store: Path, wanted: RunFilter) -> list[RunFacts]:
    """Return the wanted runs, the newest first; raise as `RunIndex`."""
    with open_index(store) as index:
        return index.runs(wanted)


def diagnose_new(store: Path, wanted: RunFilter) -> list[str]:
    """Diagnose wanted runs that have ended and have no verdict, and keep it in each; return what failed."""
    from dtprof.session.engines import IN_THIS_PROCESS
    from dtprof.session.run_diagnosis import diagnose_run

    # The verdict decides about the outcome: a filter by that comes afterwards.
    limit = None if wanted.outcomes else wanted.limit
    runs = list_runs(store, replace(wanted, outcomes=(), limit=limit))
    problems = []
    for facts in runs:
        if facts.summary or facts.outcome not in UNDIAGNOSED or _has_verdict(store / facts.name):
            continue
        try:
            _write(store / facts.name, diagnose_run(store / facts.name, IN_THIS_PROCESS))
        except (DtprofError, OSError) as error:
            problems.append(f"{facts.name}: {error}")
    return problems


def keep_verdict(run: Path, verdict: "Verdict") -> None:
    """Keep a verdict in its run for lists, where the run has ended and can be written to."""
    manifest = read_manifest(run)
    if manifest.ended_realtime_ns or manifest.is_without_launcher:
        with suppress(OSError):
            _write(run, verdict)


def _write(run: Path, verdict: "Verdict") -> None:
    run_facts.write_verdict(run, verdict.outcome, verdict.faults[0].summary if verdict.faults else "")


def measure_steps(store: Path, wanted: RunFilter) -> tuple[list[RunFacts], list[str]]:
    """Return the wanted runs with the median duration of a step, measured once a run, and what could not be."""
    from dtprof.session.engines import IN_THIS_PROCESS, open_run
    from dtprof.session.run_measurement import summarise_opened

    measured, problems = [], []
    with open_index(store) as index:
        for facts in index.runs(wanted):
            if facts.step_ns is None and facts.outcome != run_facts.RUNNING:
                try:
                    summary = summarise_opened(open_run(store / facts.name, IN_THIS_PROCESS), IN_THIS_PROCESS)
                    duration = summary.steps.duration_ns
                    facts = index.put_step(facts, None if duration is None else duration.median)
                except DtprofError as error:
                    problems.append(f"{facts.name}: {error}")
            measured.append(facts)
    return measured, problems


def surplus(store: Path, wanted: RunFilter, policy: "Policy | None") -> list[tuple[RunFacts, str]]:
    """Return the runs to remove and why: those that a policy does not keep, else all that are wanted and have ended."""
    runs = list_runs(store, wanted)
    if policy is not None:
        return policy.surplus(runs, now_ns=time.time_ns())
    return [(facts, "chosen") for facts in runs if facts.outcome != run_facts.RUNNING]


def remove(store: Path, runs: Sequence[RunFacts]) -> list[str]:
    """Remove runs; return a sentence for each that stays."""
    from dtprof.session.run_retention import remove_run

    problems = []
    for facts in runs:
        try:
            remove_run(store.resolve(), facts)
        except DtprofError as error:
            problems.append(str(error))
    return problems


def _has_verdict(run: Path) -> bool:
    return bool(read_document(run / paths.VERDICT))
