"""Run a job from start to end: directory, hook, child, watcher, closing note."""

import dataclasses
import errno
import functools
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dtprof import launchers
from dtprof.errors import CommandNotFoundError, DiskFullError, DtprofError
from dtprof.fence import WARNED, fenced, is_first, is_run_gone, set_run
from dtprof.launch import (
    announcement,
    child_process,
    clock_probes,
    hang_watcher,
    interpreter,
    run_directory,
    run_joining,
    run_processes,
    storage,
)
from dtprof.launch.archiver import Archiver
from dtprof.launch.comparison_thread import Compare, Comparer
from dtprof.launch.kernel_log import count_host_oom_kills, list_oom_victims
from dtprof.launch.line_sampler import LineSampler
from dtprof.launch.memory_cgroup import count_oom_kills
from dtprof.launch.metrics_threads import NO_METRICS, Metrics, MetricsSettings
from dtprof.launch.node_sampler import Sampler
from dtprof.monitor.prometheus.node_state import NodeState
from dtprof.records import paths, remote, writer
from dtprof.records.shared_follower import SharedFollower, Subscription
from dtprof.settings import ENV_OFF

if TYPE_CHECKING:
    from dtprof.launch.collector.run_sender import CollectThread

EXIT_HANG = 3
STOP_GRACE_S = 10.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobSettings:
    """How to run the job."""

    output: Path | None
    force: bool
    join: bool
    native: bool
    max_log_mb: float
    hang_after_s: float
    stop_on_hang: bool
    metrics: MetricsSettings = NO_METRICS
    check: str = ""
    collect: str = ""  # where the run is sent while it is recorded; empty: nowhere
    trace: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Settings of profiler windows, which the ranks read: values by variable of the environment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class JobEnd:
    """How the job ended."""

    run: Path | None  # None: nothing could be recorded
    status: int  # of the child; negative: the signal that ended it
    stopped_by_us: bool


def say(text: str) -> None:
    """Print progress on stderr."""
    print("\n".join(f"dtprof: {line}" for line in text.splitlines()), file=sys.stderr, flush=True)


def _mark_as_said(text: str, records: Path) -> None:
    """Keep the ranks of this host from repeating a line."""
    node = records / paths.node_folder_name(writer.host_name())
    node.mkdir(exist_ok=True)
    is_first(node, text, mark=WARNED)


def run_job(
    command: Sequence[str],
    settings: JobSettings,
    diagnose: hang_watcher.DiagnoseStall,
    *,
    compare: Callable[[Subscription], Compare] | None = None,
) -> JobEnd:
    """Run the command with its ranks instrumented.

    Raises:
        OutputError: the run directory cannot be made.
        CommandNotFoundError: the command cannot be started.
    """
    check_command(command[0])
    run = (settings.output or run_directory.default_directory(command)).absolute()
    shown = {
        **({"check": settings.check} if settings.check else {}),
        "max_log_mb": f"{settings.max_log_mb:g}",
        "hang_after_s": f"{settings.hang_after_s:g}",
        "on_hang": "stop" if settings.stop_on_hang else "report",
        **{name.removeprefix("DTPROF_").lower(): value for name, value in settings.trace.items() if value},
    }
    job = run_joining.job_key(command)
    try:
        is_creator = run_joining.enter(run, force=settings.force, join=settings.join, job=job)
        manifest: run_directory.LauncherDocument
        if is_creator:
            manifest = run_directory.RunManifest(run, command, shown, job=job)
        else:
            manifest = run_directory.JoinedLauncher(run, command)
    except DiskFullError as error:
        say(f"{error}: nothing is recorded, the job runs uninstrumented")
        # Off, or a launcher whose every job is recorded would become the command of another `dtprof run`, for ever.
        bare = {**os.environ, ENV_OFF: "1"}
        return JobEnd(run=None, status=start(command, bare).wait(lambda: None), stopped_by_us=False)
    set_run(run)
    may_be_joined = settings.join or job is not None  # else no port is opened
    with child_process.signals_held():
        clock = clock_probes.start(run, is_reference=is_creator, answers=may_be_joined)
    hook = interpreter.choose_hook(command[0], native=settings.native, environment=dict(os.environ), say=say)
    if hook.message:
        say(hook.message)
        manifest.note(hook.message)
    if not is_creator and (remark := run_directory.version_remark(run)):
        say(remark)
        manifest.note(remark)
    if starter := launchers.find_remote_starter(command, os.environ):
        remark = _remote_remark(starter)
        say(remark)
        manifest.note(remark)
    records = _place_of_records(run, settings, manifest)
    if hook.message:
        _mark_as_said(hook.message, records)
    environment = interpreter.job_environment(run=records, hook=hook)
    environment["DTPROF_MAX_LOG_MB"] = f"{settings.max_log_mb:g}"
    environment |= settings.trace
    environment["DTPROF_CHECK"] = settings.check
    keep_program = functools.partial(_keep_program, records, time.time_ns())
    watch = hang_watcher.Watcher(
        run=records,
        hang_after_s=settings.hang_after_s,
        diagnose=diagnose,
        say=say,
        boot_id=writer.boot_id(),
        on_hang=keep_program,
    )
    oom_before, host_oom_before = count_oom_kills(), count_host_oom_kills()
    began_ns = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    announced = announcement.announce(environment)
    process = start(command, environment)
    stopper = _Stopper(process, watch, enabled=settings.stop_on_hang)
    companions = _Companions(clock.stop)
    collecting = _collect(run, records, settings, job) if is_creator and settings.collect else None
    companions.start(functools.partial(_node_state, run, watch, oom_before), watch, records, settings.metrics, compare)
    status = process.wait(stopper.tick)
    announcement.withdraw(announced)
    companions.stop(status)
    watch.poll_last()
    stopped = stopper.stopping_since_s is not None
    if stopped:
        run_processes.end_leftovers(records, watch.pids)
    if status != 0:
        keep_program()
    if records != run:
        _bring_home(records, run)
    ends: run_directory.JobEndFields = {
        "ended_realtime_ns": time.time_ns(),
        "ended_monotonic_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        "exit_status": status,
        "stopped_on_hang": stopped,
        "hang_detected_ns": watch.hang_detected_ns,
        "oom_kills": count_oom_kills() - oom_before,
        "host_oom_kills": count_host_oom_kills() - host_oom_before,
        "oom_victims": [dataclasses.asdict(victim) for victim in list_oom_victims(since_ns=began_ns)],
        "truncated": watch.truncated,
    }
    if is_creator:
        ends["hosts"] = run_directory.hosts_of(run)
    is_written = manifest.update(ends)
    if collecting is not None:
        collecting.finish(run)
    if not is_written and not is_run_gone():
        say(f"{run / paths.MANIFEST} could not be completed (disk full?): the run lacks the job's exit status")
    return JobEnd(run=run, status=status, stopped_by_us=stopped)


class _Companions:
    """Threads beside the job: archiver, samplers, metrics, comparison. The job goes on whatever becomes of them."""

    def __init__(self, *stops: Callable[[], object]) -> None:
        self._stops = list(stops)
        self._comparer: Comparer | None = None

    @fenced("a part of the watch over the job", "is not started")
    def start(
        self,
        node_state: Callable[[Sampler], NodeState],
        watch: hang_watcher.Watcher,
        records: Path,
        metrics: MetricsSettings,
        compare: Callable[[Subscription], Compare] | None,
    ) -> None:
        """Start all of them."""
        node_folder = records / paths.node_folder_name(writer.host_name())
        self._stops.append(Archiver(records).stop)
        sampler = Sampler(node_folder, lambda: watch.pids)
        follower = SharedFollower(records, boot_id=writer.boot_id())
        self._stops.append(LineSampler(follower.subscribe(), node_folder).stop)
        self._stops += [sampler.stop, Metrics.start(metrics, follower, lambda: node_state(sampler), say=say).stop]
        if compare is not None:
            self._comparer = Comparer(compare, follower.subscribe(), node_folder, say=say)

    def stop(self, status: int) -> None:
        """End them, the newest first."""
        if self._comparer is not None:
            self._stops.append(functools.partial(self._comparer.stop, compares_last=status == 0))
        for stop in reversed(self._stops):
            fenced("a part of the watch over the job", "did not end in order")(stop)()


def _node_state(run: Path, watch: hang_watcher.Watcher, oom_before: int, sampler: Sampler) -> NodeState:
    """Return the state of this node that is not in the records."""
    return NodeState(
        run=run.name,
        host=writer.host_name(),
        is_hung=watch.hang is not None,
        truncated=watch.truncated,
        oom_kills=count_oom_kills() - oom_before,
        sample=sampler.newest,
        description=sampler.description,
    )


@fenced("the structure of the program's source", "is not kept")
def _keep_program(records: Path, started_realtime_ns: int) -> None:
    from dtprof.diagnosis.sources.program_source import keep_program

    keep_program(records, writer.host_name(), started_realtime_ns)


@fenced("the run", "is not sent to the collector")
def _collect(run: Path, records: Path, settings: JobSettings, job: str | None) -> "CollectThread | None":
    """Begin to send the run."""
    from dtprof.launch.collector.collect_target import make_sink
    from dtprof.launch.collector.run_sender import CollectThread, RunSender, new_card

    card = new_card(
        run,
        is_named=settings.output is not None,
        job=job,
        joins=settings.join,
        host=writer.host_name(),
    )
    try:
        sender = RunSender(records, make_sink(settings.collect), card)
    except DtprofError as error:
        say(f"{error}: the run is kept here alone")
        return None
    return CollectThread(sender, run=run, say=say, target=remote.shown(settings.collect))


def _remote_remark(starter: str) -> str:
    """Return what to do where a program starts the ranks of other hosts, which this launcher does not reach."""
    if starter == "deepspeed":
        way = "start it on each host: dtprof run --join -o DIR -- deepspeed --no_ssh --node_rank N ..."
    else:
        way = f"put dtprof run behind {starter}: {starter} ... dtprof run -o DIR -- python train.py"
    return f"{starter} starts ranks on other hosts, which this launcher does not record; to record them, {way}"


def _place_of_records(run: Path, settings: JobSettings, manifest: run_directory.LauncherDocument) -> Path:
    """Return the folder that ranks write to: the run, or a local one where the run lies on a network file system."""
    place = storage.examine(run)
    remark = storage.remark(run, place, max_log_mb=settings.max_log_mb)
    if remark is not None:
        say(remark)
        manifest.note(remark)
    if not place.is_network:
        return run
    local = storage.local_place(run)
    if local is None:
        text = f"{run} lies on a network ({place.kind}) and no local disk was found: set DTPROF_LOCAL_DIR to one"
        say(text)
        manifest.note(text)
        return run
    manifest.note(f"{run} lies on a network ({place.kind}): records were written to {local} and moved at the end")
    manifest.update({})
    return local


def _bring_home(records: Path, run: Path) -> None:
    try:
        storage.bring_home(records, run)
    except OSError as error:
        say(f"records could not be moved to {run} ({error.strerror}): what is missing there is in {records}")


def check_command(name: str) -> None:
    """Refuse a command that cannot be started, before a run is created for it.

    Raises:
        CommandNotFoundError: there is no such command, or it is not executable.
    """
    if shutil.which(name) is None:
        exists = os.sep in name and Path(name).exists()
        raise _not_found(name, os.strerror(errno.EACCES if exists else errno.ENOENT))


def start(command: Sequence[str], environment: dict[str, str], *, stdout: int = 1) -> child_process.Child:
    """Start the command.

    Raises:
        CommandNotFoundError: the system cannot execute it.
    """
    try:
        return child_process.Child(command, environment, stdout=stdout)
    except OSError as error:
        raise _not_found(command[0], error.strerror) from error


def _not_found(name: str, reason: str | None) -> CommandNotFoundError:
    example = "torchrun --nproc-per-node 4 train.py"
    if Path(name).is_file():  # a script without a mark that it can be executed, or not named by its path
        example = f"{'python' if name.endswith('.py') else 'bash'} {shlex.quote(name)}"
    return CommandNotFoundError(
        f"{name!r} cannot be started ({reason}); expected a command on PATH or a path to one, "
        f"for example: dtprof run -- {example}"
    )


class _Stopper:
    """Polls the watcher; stops a hung job under --on-hang stop."""

    def __init__(self, process: child_process.Child, watch: hang_watcher.Watcher, *, enabled: bool) -> None:
        self._process = process
        self._watch = watch
        self._enabled = enabled
        self._killed = False
        self.stopping_since_s: float | None = None

    @fenced("the watch over the job", "missed a poll")
    def tick(self) -> None:
        """Poll once; stop a hung job under --on-hang stop."""
        if self.stopping_since_s is None:
            self._watch.tick()
            is_hung = self._watch.hang is not None and not self._watch.may_yet_start
            if self._enabled and is_hung and self._process.status is None:
                say("stopping the job, as --on-hang stop asks")
                self.stopping_since_s = time.monotonic()
                self._process.send(signal.SIGTERM)
        elif not self._killed and time.monotonic() - self.stopping_since_s > STOP_GRACE_S:
            self._killed = True
            self._process.send(signal.SIGKILL)
