"""A run on disk as a source: the evidence of its ranks, exits, stacks and samples, for the rules.

Reads the files of the run alone. What only the caller can know, which processes are alive, comes in as `HostState`.
"""

import functools
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from dtprof.diagnosis import job_state as facts
from dtprof.diagnosis.absent_ranks import FROZEN
from dtprof.diagnosis.job_state import main_stack
from dtprof.diagnosis.sources.device_health import find_device_health
from dtprof.diagnosis.sources.link_rates import find_link_rates
from dtprof.diagnosis.sources.program_source import ProgramSource
from dtprof.diagnosis.sources.recorded_ranks import RankRead
from dtprof.diagnosis.sources.starting_ranks import find_starting
from dtprof.diagnosis.sources.waiting_launchers import find_earlier, find_rendezvous, find_unwaiting
from dtprof.diagnosis.stack_groups import read_stacks
from dtprof.diagnosis.stop_detection import find_stop
from dtprof.intervals import Column
from dtprof.job.stalls import (
    SLOW_AFTER_NS,
    JobProgress,
    Pauses,
    Progress,
    RankPhase,
    RankProgress,
    assess_job,
    hang_after_of,
    phase_of,
)
from dtprof.job.world_size import newest_attempt, resolve_world_size
from dtprof.records import reader
from dtprof.records.nodes.node_reader import (
    SILENT_AFTER_S,
    memory_shares,
    newest_resident,
    newest_samples,
    silent_hosts,
)
from dtprof.records.tables import UNKNOWN_NS, ProcessExit

NO_SAMPLES = np.zeros(0, np.int64), np.zeros(0)
MEMORY_SAMPLES = 6
"""Of memory, before the end of a rank: from these its growth is taken."""


@dataclass(frozen=True, kw_only=True)
class HostState:
    """The processes of a run on this host when the run was read."""

    boot_id: str
    now_ns: int  # on the monotonic clock of this boot
    alive: Mapping[int, bool]  # by rank, of those of this boot without an exit record
    is_stalled: bool = False  # whoever watches the job has seen it make no progress for the stall threshold


def exit_of(run: reader.Run, read: RankRead) -> ProcessExit | None:
    """Return the exit record of the process of a rank; None where nobody saw its end."""
    return run.exit_of(read.evidence.host, read.evidence.pid, since_ns=read.first_ns)


def collect_attempt(run: reader.Run, reads: Iterable[RankRead]) -> facts.JobState:
    """Return the evidence of an attempt after which the job was restarted: none of its ranks is alive."""
    ranks: list[facts.RankState] = []
    declared: dict[int, int] = {}
    for rank in reads:
        ranks.append(replace(rank.evidence, exit=exit_of(run, rank), alive=False))
        declared[rank.evidence.rank] = rank.world_size
    return facts.assemble_job(
        ranks,
        world_size=resolve_world_size(declared.values(), declared),
        manifest=replace(run.manifest, exit_status=1),
        stalled=any(map(_is_blocked, ranks)),
        stopped_on_hang_ns=None,
    )


def collect(
    run: reader.Run,
    reads: Iterable[RankRead],
    host: HostState,
    *,
    find_stragglers: Callable[[], facts.Stragglers] | None,
) -> facts.JobState:
    """Return the evidence of the newest attempt of a run.

    Parameters:
        reads: what the files of each rank hold.
        host: what this host knows of the processes.
        find_stragglers: finds those of the run, where a rule needs them; None: they are not looked for.
    """
    same_boot = run.manifest.boot_id == host.boot_id
    ranks, problems, last_ns = [], list(run.problems), 0
    declared: dict[int, int] = {}
    attempt = newest_attempt(run.folders)
    boots: dict[int, str] = {}
    for read in reads:
        recorded = read.evidence
        document = run.exit_records.stacks_of(recorded.host)
        taken_ns = t_ns if isinstance(t_ns := document.get("t_ns"), int) else None
        stacks = [
            replace(main_stack(sampled), t_ns=taken_ns)
            for sampled in read_stacks(document, {recorded.pid: recorded.rank})
        ]
        ranks.append(
            replace(
                recorded,
                exit=exit_of(run, read),
                stack=stacks[0] if stacks else None,
                alive=host.alive.get(recorded.rank),
            )
        )
        boots[recorded.rank] = read.boot_id
        problems += read.problems
        if recorded.attempt == attempt:
            declared[recorded.rank] = read.world_size
        last_ns = max(last_ns, recorded.last_ns)
    world_size = resolve_world_size(declared.values(), declared)
    # Once a rank runs, a rendezvous is over.
    rendezvous = () if run.folders else find_rendezvous(run.exit_records.stacks)
    ranks += _ends_before_any_record(run, world_size)
    silent_s = _find_silent(run, ranks)
    stop = _find_stop(run, ranks, boots, silent_s) if not any(rank.alive for rank in ranks) else None
    progress = None
    if not run.manifest.ended_realtime_ns and same_boot and any(rank.alive for rank in ranks) and not host.is_stalled:
        progress = _assess(run, ranks, boots, now_ns=host.now_ns)
    source = ProgramSource(run.path, run.manifest.started_realtime_ns)
    return facts.assemble_job(
        ranks,
        world_size=world_size,
        manifest=run.manifest,
        stalled=bool(rendezvous) or _is_stalled(run, ranks, stop, progress, silent_s),
        progress=progress,
        stop=stop,
        silent_s=silent_s,
        stopped_on_hang_ns=run.manifest.stopped_on_hang_ns,
        oom_kills=run.manifest.oom_kills,
        find_stragglers=find_stragglers,
        host_oom_kills=run.manifest.host_oom_kills,
        oom_victims=run.manifest.oom_victims,
        find_memory_use=functools.cache(lambda: _find_memory_use(run, ranks, boots)),
        find_resident=functools.cache(lambda: _find_resident(run, ranks, boots)),
        find_links=functools.cache(lambda: find_link_rates(run.path, {rank.host for rank in ranks})),
        find_device_health=functools.cache(lambda: find_device_health(run.path, ranks, boots)),
        find_handlers=source.find_handlers,
        find_place=source.find_place,
        was_changed=source.was_changed,
        problems=tuple(problems),
        starting=find_starting(
            run.exit_records.stacks.values(),
            known={rank.rank for rank in ranks},
            world_size=world_size,
        ),
        rendezvous=rendezvous,
        unwaiting_hosts=find_unwaiting(run.path, rendezvous),
        earlier_hosts=find_earlier(run.path, rendezvous),
        asleep_s=_time_asleep(run, ranks, stop, last_ns=last_ns, same_boot=same_boot),
    )


def _ends_before_any_record(run: reader.Run, world_size: int) -> list[facts.RankState]:
    """Return ranks that were started, and failed or were killed before they opened a log."""
    found: dict[int, facts.RankState] = {}
    started = {int(row["env_rank"]): row for row in reversed(run.processes) if str(row.get("env_rank")).isdecimal()}
    for rank, row in started.items():
        ended = run.exit_of(str(row.get("host", "")), row["pid"]) if isinstance(row.get("pid"), int) else None
        if rank in run.folders or rank >= world_size or ended is None or ended.status == 0:
            continue
        own = facts.RankState(
            rank=rank, attempt=0, pid=ended.pid, host=str(row.get("host", "")), exit=ended, last_ns=ended.t_ns
        )
        if not own.stopped_politely:
            found[rank] = own
    return list(found.values())


def _find_resident(run: reader.Run, ranks: list[facts.RankState], boots: dict[int, str]) -> dict[int, int]:
    """Return the RAM of each rank at its last sample, in bytes."""
    held = newest_resident(run.path)
    seen = ((rank.rank, held.get((boots.get(rank.rank, ""), rank.pid))) for rank in ranks)
    return {rank: nbytes for rank, nbytes in seen if nbytes is not None}


def _find_memory_use(
    run: reader.Run, ranks: list[facts.RankState], boots: dict[int, str]
) -> dict[int, facts.MemoryUse]:
    """Return how full the memory of its host was when each rank ended: samples after that show what it gave back."""
    found = {}
    shares = memory_shares(run.path)
    for rank in ranks:
        times, used = shares.get(boots.get(rank.rank, ""), NO_SAMPLES)
        end_ns = rank.exit.t_ns if rank.exit is not None and rank.exit.t_ns != UNKNOWN_NS else rank.last_ns
        before = np.flatnonzero(times <= end_ns)[-MEMORY_SAMPLES:]
        if len(before):
            found[rank.rank] = _memory_use(times[before], used[before], end_ns)
    return found


def _memory_use(times: Column, used: npt.NDArray[np.float64], end_ns: int) -> facts.MemoryUse:
    """Return the use at the last sample, and what it had come to by a later time if it grew on as it did before."""
    steps_s = np.diff(times) / 1e9
    growth = float(np.median(np.diff(used) / steps_s)) if len(used) > 2 and (steps_s > 0).all() else 0.0
    since_s = (end_ns - int(times[-1])) / 1e9
    return facts.MemoryUse(share=float(used[-1]), since_s=since_s, growth_per_s=growth)


def _find_silent(run: reader.Run, ranks: Sequence[facts.RankState]) -> dict[str, float]:
    """Return the hosts of which nothing was heard any more though other hosts were, and for how long, in seconds."""
    running = {rank.host for rank in ranks if rank.exit is None and not rank.finished}
    return silent_hosts(run.path, {rank.host for rank in ranks}, running)


def _find_stop(
    run: reader.Run, ranks: list[facts.RankState], boots: dict[int, str], silent: Container[str]
) -> facts.Stop | None:
    """Return how the job was going when it was stopped from outside, or killed together with dtprof.

    Parameters:
        silent: hosts of which nobody knows how their ranks went on.
    """
    last_seen: dict[str, int] = {}
    if not run.manifest.ended_realtime_ns:
        sampled = newest_samples(run.path)
        last_seen = {rank.host: sampled[boot] for rank in ranks if (boot := boots.get(rank.rank, "")) in sampled}
        last_seen = {host: t_ns for host, t_ns in last_seen.items() if host not in silent}
    stop = find_stop(ranks, last_seen)
    if stop is not None and stop.by_kill:
        hung = any(map(_is_blocked, ranks)) and (stop.had_stalled or _was_reported_hung(run, ranks))
        return stop if hung and not run.manifest.oom_kills else None
    return stop


def _assess(run: reader.Run, ranks: Iterable[facts.RankState], boots: Mapping[int, str], *, now_ns: int) -> JobProgress:
    """Return how a running job fares."""
    pauses: dict[str, Pauses] = {}
    for boot in set(boots.values()):  # hosts have clocks of their own
        intervals = {interval for rank in ranks if boots.get(rank.rank) == boot for interval in rank.active_intervals}
        pauses.setdefault(boot, Pauses()).add(sorted(intervals))
    return assess_job(
        {
            rank.rank: RankProgress(
                quiet_s=max(0, now_ns - rank.last_ns) / 1e9,
                phase=_phase(rank),
                waits=_is_blocked(rank) or not rank.alive,
            )
            for rank in ranks
        },
        hang_after_s=hang_after_of(run.manifest.settings),
        usual_pause_s=min((known.usual_s for known in pauses.values()), default=0.0),
    )


def _phase(rank: facts.RankState) -> RankPhase:
    """Return the activity of a rank; a rank with an idle or frozen stack is in no first step or evaluation."""
    phase = phase_of(rank.open_phases, steps=rank.steps or 0)
    if rank.stack is None or (rank.stack.is_busy and rank.stack.state not in FROZEN):
        return phase
    is_idle_in = phase in (RankPhase.FIRST_STEP, RankPhase.EVALUATION)
    return RankPhase.STEPS if is_idle_in or rank.stack.state in FROZEN else phase


def _is_stalled(
    run: reader.Run,
    ranks: list[facts.RankState],
    stop: facts.Stop | None,
    progress: JobProgress | None,
    silent: Collection[str],
) -> bool:
    """Say whether ranks are, or were at their end, blocked: then open operations mean something."""
    if not any(map(_is_blocked, ranks)):
        return False
    if stop is not None:
        # With a host that is silent as long as the others wait, no usual pause has to be exceeded.
        waits = silent and stop.quiet_ns >= SILENT_AFTER_S * 1e9
        return bool(waits) or stop.had_stalled or _was_reported_hung(run, ranks)
    if run.manifest.ended_realtime_ns:
        return run.manifest.exit_status != 0
    # Nobody knows how a job fares that was killed together with dtprof: this is where it was.
    return progress is None or progress.state != Progress.PROGRESSING


def _was_reported_hung(run: reader.Run, ranks: list[facts.RankState]) -> bool:
    """Say whether `dtprof run` reported a hang and no rank made progress after it."""
    detected_ns = run.manifest.hang_detected_ns
    return detected_ns is not None and all(rank.moments[-1:] <= (detected_ns,) for rank in ranks)


def _is_blocked(rank: facts.RankState) -> bool:
    """Say whether a rank is, or was at its end, in a call that others must make too."""
    return rank.first_blocking is not None or rank.in_init or rank.making_group is not None


def _time_asleep(
    run: reader.Run, ranks: list[facts.RankState], stop: facts.Stop | None, *, last_ns: int, same_boot: bool
) -> float | None:
    """Return for how long all ranks had slept outside any operation when their stacks were taken, or None."""
    goes_on = not run.manifest.ended_realtime_ns and same_boot and all(rank.alive for rank in ranks)
    if not (goes_on or stop is not None) or not all(map(_sleeps, ranks)):
        return None
    newest_ns = last_ns if goes_on else max((rank.moments[-1] for rank in ranks if rank.moments), default=last_ns)
    times = [run.exit_records.stacks_of(rank.host).get("t_ns") for rank in ranks]
    taken = [t_ns for t_ns in times if isinstance(t_ns, int) and t_ns - newest_ns >= SLOW_AFTER_NS]
    return (min(taken) - newest_ns) / 1e9 if taken and len(taken) == len(ranks) else None


def _sleeps(rank: facts.RankState) -> bool:
    stack = rank.stack
    return (
        rank.first_blocking is None
        and not (rank.in_init or rank.finished)
        and stack is not None
        and stack.cpu_share is not None
        and not stack.is_busy
    )
