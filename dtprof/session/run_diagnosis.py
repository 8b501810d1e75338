"""Diagnose a run on disk: what its files say, and the processes of the job where they are still there."""

import functools
import site
import sysconfig
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import dtprof
from dtprof.diagnosis import job_state as facts
from dtprof.diagnosis.attempts import MAX_ATTEMPTS, Attempt, remember
from dtprof.diagnosis.findings import Finding, Verdict
from dtprof.diagnosis.job_state import QUIET_NS, main_stack
from dtprof.diagnosis.reported_mismatches import seconds_after_start
from dtprof.diagnosis.rules.unjoined_ranks import find_starting
from dtprof.diagnosis.sources import rank_evidence
from dtprof.diagnosis.sources.rank_evidence import RankRead, read_ranks
from dtprof.diagnosis.stack_groups import read_stacks
from dtprof.diagnosis.stop_detection import find_stop
from dtprof.diagnosis.verdict import decide
from dtprof.job.rank_executor import THIS_PROCESS, Executor
from dtprof.records import reader, writer
from dtprof.records.node_reader import newest_resident, newest_samples
from dtprof.records.tables import ProcessExit
from dtprof.session.engines import IN_THIS_PROCESS, Engine, executor_for, open_run

if TYPE_CHECKING:
    from dtprof.analysis.results import Summary


def diagnose_run(
    path: Path, engine: Engine = IN_THIS_PROCESS, *, summary: "Summary | None" = None, in_a_hurry: bool = False
) -> Verdict:
    """Return the verdict on a run directory; stragglers are looked for by the engine, or are those of its summary.

    In a hurry, beside a running job, stragglers are not looked for and fewer operations are compared: however long the
    job has run, the verdict takes seconds.

    Raises:
        NotARunError: the path holds no run.
        MissingDependencyError, SchedulerError, WorkerLostError: the engine cannot do it.
    """
    run = open_run(path, engine)
    with executor_for(engine, run) as executor:
        if in_a_hurry:
            return diagnose_opened(run, None, executor, newest=rank_evidence.MAX_OPERATIONS)
        return diagnose_opened(run, lambda: summary or _summarise(run, executor), executor)


def diagnose_opened(
    run: reader.Run,
    summarise: Callable[[], "Summary"] | None,
    executor: Executor = THIS_PROCESS,
    *,
    newest: int | None = None,
) -> Verdict:
    """Return the verdict on a run that is open.

    Parameters:
        summarise: gives the summary, where a rule needs it; None: stragglers are not looked for.
        newest: operations of all ranks together that are compared; None for as many as memory allows.
    """
    return _with_times_seen(_diagnose_attempts(run, summarise, executor, newest), run)


def _diagnose_attempts(
    run: reader.Run, summarise: Callable[[], "Summary"] | None, executor: Executor, newest: int | None
) -> Verdict:
    last = _judge(collect(run, summarise, executor, newest=newest))
    if last.finding is None or all(len(attempts) == 1 for attempts in run.folders.values()):
        return last.verdict
    numbers = Counter(number for attempts in run.folders.values() for number, _ in attempts[:-1])
    earlier = [number for number in sorted(numbers) if numbers[number] > 1][-MAX_ATTEMPTS:]
    return remember(last, [_judge(collect_attempt(run, number, executor, newest=newest)) for number in earlier])


def _with_times_seen(verdict: Verdict, run: reader.Run) -> Verdict:
    """Say of mismatches that `dtprof run` told of while the job ran when that was."""
    started_ns = run.manifest.started_realtime_ns
    seen = {
        (row.get("kind"), row.get("group"), row.get("seq")): seconds_after_start(row, started_ns)
        for row in run.mismatches
    }

    def dated(finding: Finding) -> Finding:
        after_s = seen.get((finding.kind, finding.group.name if finding.group else "", finding.seq or 0))
        if after_s is None:
            return finding
        when = f"`dtprof run` told of it while the job ran, {after_s:.0f} s after its start"
        return replace(finding, evidence=(*finding.evidence[:3], when, *finding.evidence[3:]))

    return replace(verdict, findings=tuple(map(dated, verdict.findings)))


def _judge(evidence: facts.Evidence) -> Attempt:
    hosts = {rank.rank: rank.host for rank in evidence.ranks.values()}
    return Attempt(verdict=decide(evidence, ("run",)), hosts=hosts)


def _exit_of(run: reader.Run, one: RankRead) -> ProcessExit | None:
    return run.exit_of(one.evidence.host, one.evidence.pid, since_ns=one.first_ns)


def collect_attempt(run: reader.Run, number: int, executor: Executor, *, newest: int | None = None) -> facts.Evidence:
    """Read what the rules need of an attempt after which the job was restarted."""
    ranks, world_size = [], 0
    present = [rank for rank, attempts in run.folders.items() if number in dict(attempts)]
    for one in read_ranks(run, present, executor, attempt=number, newest=newest):
        ranks.append(replace(one.evidence, exit=_exit_of(run, one), alive=False))
        world_size = max(world_size, one.world_size)
    return facts.gather(
        ranks,
        world_size=world_size,
        manifest=replace(run.manifest, exit_status=1),
        stalled=any(map(_is_held_up, ranks)),
        stopped_on_hang_ns=None,
    )


def collect(
    run: reader.Run,
    summarise: Callable[[], "Summary"] | None,
    executor: Executor,
    *,
    newest: int | None = None,
) -> facts.Evidence:
    """Read what the rules need from a run on disk, and from the processes where they are still there."""
    document = run.job_facts
    same_boot = document.get("boot_id") == writer.boot_id()
    ranks, problems, world_size, last_ns = [], list(run.problems), 0, 0
    boots: dict[int, str] = {}
    for one in read_ranks(run, run.ranks, executor, newest=newest):
        own = one.evidence
        exit_record = _exit_of(run, one)
        alive = None
        if one.boot_id == writer.boot_id() and exit_record is None:
            alive = is_alive(own.pid, run.path)
        stacks = [
            main_stack(seen, is_user=_is_user_file)
            for seen in read_stacks(run.endings.stacks_of(own.host), {own.pid: own.rank})
        ]
        ranks.append(replace(own, exit=exit_record, stack=stacks[0] if stacks else None, alive=alive))
        boots[own.rank] = one.boot_id
        problems += one.problems
        world_size = max(world_size, one.world_size)
        last_ns = max(last_ns, own.last_ns)
    ranks += _ends_before_any_record(run, world_size)
    hang = document.get("hang_detected_ns")
    stopped = document.get("stopped_on_hang")
    stop = _find_stop(run, ranks, boots) if not any(rank.alive for rank in ranks) else None
    return facts.gather(
        ranks,
        world_size=world_size,
        manifest=run.manifest,
        stalled=_is_stalled(run, ranks, stop, last_ns=last_ns, same_boot=same_boot),
        stop=stop,
        stopped_on_hang_ns=hang if stopped and isinstance(hang, int) else None,
        oom_kills=document.get("oom_kills") if isinstance(document.get("oom_kills"), int) else 0,
        find_stragglers=(lambda: _find_stragglers(summarise())) if summarise is not None else None,
        find_resident=functools.cache(lambda: _find_resident(run, ranks, boots)),
        find_handlers=functools.cache(lambda file: _find_handlers(Path(file), run.manifest.started_realtime_ns)),
        problems=tuple(problems),
        starting=find_starting(
            run.endings.stacks.values(),
            known={rank.rank for rank in ranks},
            world_size=world_size,
            is_user=_is_user_file,
        ),
        at_rest_s=_time_at_rest(run, ranks, stop, last_ns=last_ns, same_boot=same_boot),
    )


def _ends_before_any_record(run: reader.Run, world_size: int) -> list[facts.RankEvidence]:
    """Return ranks that were started, and failed or were killed before they opened a log."""
    found: dict[int, facts.RankEvidence] = {}
    started = {int(row["env_rank"]): row for row in reversed(run.processes) if str(row.get("env_rank")).isdecimal()}
    for rank, row in started.items():
        ended = run.exit_of(str(row.get("host", "")), row["pid"]) if isinstance(row.get("pid"), int) else None
        if rank in run.folders or rank >= world_size or ended is None or ended.status == 0:
            continue
        own = facts.RankEvidence(
            rank=rank, attempt=0, pid=ended.pid, host=str(row.get("host", "")), exit=ended, last_ns=ended.t_ns
        )
        if not own.stopped_politely:
            found[rank] = own
    return list(found.values())


def _summarise(run: reader.Run, executor: Executor) -> "Summary":
    from dtprof.analysis.run_summary import summarise

    return summarise(run, executor)


def _find_stragglers(summary: "Summary") -> facts.Stragglers:
    first, last = summary.steps.used or (1, 0)
    return facts.Stragglers(steps=last - first + 1, found=summary.stragglers)


def _find_resident(run: reader.Run, ranks: list[facts.RankEvidence], boots: dict[int, str]) -> dict[int, int]:
    """Return what each rank held in RAM when it was last sampled, in bytes."""
    held = newest_resident(run.path)
    seen = ((rank.rank, held.get((boots.get(rank.rank, ""), rank.pid))) for rank in ranks)
    return {rank: nbytes for rank, nbytes in seen if nbytes is not None}


def _find_handlers(file: Path, started_ns: int) -> dict[int, facts.Handler]:
    """Return the exception handlers around collectives of a source file that is as it was when the job started."""
    from dtprof.lint.linting import calls_in_handlers

    try:
        if file.suffix != ".py" or not file.is_file() or file.stat().st_mtime_ns >= started_ns:
            return {}
        calls = calls_in_handlers(file)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    return {
        call.place.line: facts.Handler(text=call.handler.text, line=call.handler.line, call=call.place.text)
        for call in calls
    }


def _find_stop(run: reader.Run, ranks: list[facts.RankEvidence], boots: dict[int, str]) -> facts.Stop | None:
    """Return how the job was going when it was stopped from outside, or killed together with dtprof."""
    last_seen: dict[str, int] = {}
    if not run.manifest.ended_realtime_ns:
        sampled = newest_samples(run.path)
        last_seen = {rank.host: sampled[boot] for rank in ranks if (boot := boots.get(rank.rank, "")) in sampled}
    stop = find_stop(ranks, last_seen)
    if stop is not None and stop.by_kill:
        hung = any(map(_is_held_up, ranks)) and (stop.stood_still or _was_told(run, ranks))
        return stop if hung and not run.job_facts.get("oom_kills") else None
    return stop


def _is_stalled(
    run: reader.Run, ranks: list[facts.RankEvidence], stop: facts.Stop | None, *, last_ns: int, same_boot: bool
) -> bool:
    """Say whether ranks are, or were at their end, held up: then open operations mean something."""
    if not any(map(_is_held_up, ranks)):
        return False
    if stop is not None:
        return stop.stood_still or _was_told(run, ranks)
    if run.manifest.ended_realtime_ns:
        return run.manifest.exit_status != 0
    if not same_boot or not any(rank.alive for rank in ranks):
        return True  # killed together with dtprof: this is where it stood
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) - last_ns > QUIET_NS


def _was_told(run: reader.Run, ranks: list[facts.RankEvidence]) -> bool:
    """Say whether `dtprof run` told of a hang after which nothing went on."""
    detected_ns = run.job_facts.get("hang_detected_ns")
    return isinstance(detected_ns, int) and all(rank.moments[-1:] <= (detected_ns,) for rank in ranks)


def _is_held_up(rank: facts.RankEvidence) -> bool:
    """Say whether a rank is, or was at its end, in a call that others must make too."""
    return rank.front is not None or rank.in_init or rank.making_group is not None


def _time_at_rest(
    run: reader.Run, ranks: list[facts.RankEvidence], stop: facts.Stop | None, *, last_ns: int, same_boot: bool
) -> float | None:
    """Return for how long all ranks had slept outside any operation when their stacks were taken, or None."""
    goes_on = not run.manifest.ended_realtime_ns and same_boot and all(rank.alive for rank in ranks)
    if not (goes_on or stop is not None) or not all(map(_sleeps, ranks)):
        return None
    newest_ns = last_ns if goes_on else max((rank.moments[-1] for rank in ranks if rank.moments), default=last_ns)
    times = [run.endings.stacks_of(rank.host).get("t_ns") for rank in ranks]
    taken = [t_ns for t_ns in times if isinstance(t_ns, int) and t_ns - newest_ns >= QUIET_NS]
    return (min(taken) - newest_ns) / 1e9 if taken and len(taken) == len(ranks) else None


def _sleeps(rank: facts.RankEvidence) -> bool:
    stack = rank.stack
    return (
        rank.front is None
        and not (rank.in_init or rank.finished)
        and stack is not None
        and stack.cpu_share is not None
        and not stack.is_busy
    )


def is_alive(pid: int, run: Path) -> bool:
    """Say whether the process is still there and belongs to this run."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False
    return str(run.absolute()).encode() in environment


def is_recorded(run: reader.Run) -> bool:
    """Say whether processes of this host still write the run."""
    if run.manifest.ended_realtime_ns:
        return False
    here = [row for row in run.processes if row.get("boot_id") == writer.boot_id() and isinstance(row.get("pid"), int)]
    return any(is_alive(row["pid"], run.path) for row in here)


def _is_user_file(path: str) -> bool:
    """Say whether a frame of a stack lies in the user's own code."""
    installed = {*sysconfig.get_paths().values(), *site.getsitepackages(), str(Path(dtprof.__file__).parent)}
    return (
        Path(path).is_absolute()
        and "/site-packages/" not in path
        and "/dist-packages/" not in path
        and "/lib/python3" not in path
        and not path.startswith(tuple(f"{folder}/" for folder in installed if folder))
    )
