"""Arm one process of the job: the injected bootstrap calls this once torch has been imported.

A process that never joins a process group and never trains (a launcher's agent, a data loader worker, a compile
worker) writes no log. The first init_process_group, backward pass or optimizer step opens the log of a rank; where the
launcher sets RANK, so does a batch of data, a checkpoint, or an exception that ends the process.
"""

import ctypes
import functools
import inspect
import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from dtprof import __version__, fence, settings, torch_versions
from dtprof.capture import (
    call_sites,
    frameworks,
    group_descriptions,
    handle_check,
    nccl_durations,
    operation_batches,
    process_exits,
)
from dtprof.capture.frameworks.imports import replace_copies
from dtprof.capture.out_of_memory import out_of_memory_entry
from dtprof.capture.phase_hooks import Phases
from dtprof.capture.recorder import Recorder, open_recorder
from dtprof.capture.string_entries import entry, timed_entry
from dtprof.records import events, paths, writer
from dtprof.records.replicas import REPLICA_GROUP

PR_SET_PTRACER = 0x59616D61
NOT_OPERATIONS = {"check_for_nan"}
"""Operators of c10d that communicate nothing."""


class Process:
    """This process of the job, and its log once that is open."""

    def __init__(self, run: Path) -> None:
        """Open nothing yet."""
        self._run = run
        self._recorder: Recorder | None = None
        self._gave_up = False
        self._exits: process_exits.ExitWriter | None = None
        self._phases: Phases | None = None

    def _forget(self) -> None:
        """Begin anew in a forked process, which must not write to its parent's log."""
        self._recorder, self._gave_up = None, False

    def arm(self) -> None:
        """Hook torch."""
        import torch

        os.register_at_fork(after_in_child=self._forget)
        node = self._run / paths.node_folder_name(writer.host_name())
        node.mkdir(exist_ok=True)
        fence.share_warnings(node)
        writer.append_line(node / paths.PROCESSES, _process_fields(torch.__version__))
        if torch_versions.is_too_old(torch.__version__):
            fence.warn_once(torch_versions.refusal(torch.__version__))
            return
        _allow_stack_sampling()
        process_exits.record_children(node)
        process_exits.record_spawned_exceptions(self._record_exception)
        if "RANK" in os.environ:
            process_exits.record_uncaught(self._record_early_exception)
        if torch.distributed.is_available():
            self._hook_init()
        self._phases = Phases(self.recorder)
        self._phases.install()
        if torch.distributed.is_available():
            frameworks.install(self.recorder)

    def recorder(self, trains: bool = True) -> Recorder | None:
        """Return the recorder of this process, opening its log at the first call; None where that failed.

        A process that does not train yet, and has no RANK from a launcher, may be about to start the ranks.
        """
        if self._recorder is not None:
            return self._recorder
        if self._gave_up:
            return None
        if not trains and "RANK" not in os.environ:
            return None
        return self._open(rank=_number("RANK", 0), world_size=_number("WORLD_SIZE", 1))

    @fence.fenced("this rank")
    def _open(self, *, rank: int, world_size: int) -> Recorder | None:
        import torch

        self._gave_up = True  # before the attempt: a failure is not repeated at every phase
        if torch.utils.data.get_worker_info() is not None:
            return None  # a data loader worker inherits RANK without being that rank
        if self._is_started_by_rank():
            fence.warn_once(
                "a process that a rank started trains or joins a process group: it is not a rank of this job, and is "
                "not recorded"
            )
            return None
        restart = _number("TORCHELASTIC_RESTART_COUNT", 0)
        folder, attempt = writer.claim_rank_folder(self._run, rank, restart)
        if world_size > 1:
            os.environ[settings.ENV_RANK_ABOVE] = f"{os.getpid()} {self._run}"
        torch_folder = str(Path(torch.__file__).parent)
        local_rank = _number("LOCAL_RANK", -1)
        recorder = open_recorder(
            folder=folder,
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            attempt=attempt,
            torch_folder=torch_folder,
            torch_version=torch.__version__,
        )
        recorder.write_entry(
            timed_entry(
                "process",
                rank=rank,
                local_rank=local_rank,
                world_size=world_size,
                attempt=attempt,
                meeting=_rendezvous(),
                tap="native" if recorder.__class__.__name__ == "module" else "python",
                **_process_fields(torch.__version__),
            )
        )
        fence.on_note(lambda text: recorder.write_entry(timed_entry("note", text=text)))
        if torch.distributed.is_available():
            self._install_hooks(recorder)
        owners = call_sites.code_owners(torch_folder)
        call_sites.follow_threads(owners, recorder.write_entry)
        self._exits = process_exits.ExitWriter(recorder, owners, self._out_of_memory_entry)
        self._exits.install()
        process_exits.watch_leaving(self._mark_leaving)
        self._recorder, self._gave_up = recorder, False
        if self._phases is not None:
            self._phases.windows.begin_log(recorder, folder, rank, world_size)
        return recorder

    def _is_started_by_rank(self) -> bool:
        """Say whether a running rank of this run with several ranks started this process.

        The process inherits RANK, so its records would pass for those of that rank after a restart. The rank of a
        single-process run, in contrast, may be about to start the ranks.
        """
        pid, _, run = os.environ.get(settings.ENV_RANK_ABOVE, "").partition(" ")
        return pid.isdecimal() and int(pid) != os.getpid() and run == str(self._run) and Path("/proc", pid).exists()

    def _install_hooks(self, recorder: Recorder) -> None:
        import torch

        names = [name.split("::")[1] for name in torch._C._dispatch_get_all_op_names() if name.startswith("c10d::")]

        def describe(group_id: int, name: str) -> None:
            if line := group_descriptions.members_entry(group_id, name):
                recorder.write_entry(line)

        recorder.on_group(describe)
        if hasattr(recorder, "begin_batch"):
            operation_batches.install(recorder)
        recorder.install(sorted(set(names) - NOT_OPERATIONS))
        if settings.from_environment(settings.CHECK):
            handle_check.install(recorder)
        group_descriptions.on_first_nccl_group(lambda: nccl_durations.follow(recorder, group_descriptions.ids))

    def _out_of_memory_entry(self, error: BaseException) -> str | None:
        """Return the entry for an exception by which memory ran out, and write a snapshot of memory."""
        if self._phases is None or (line := out_of_memory_entry(error, self._phases.memory)) is None:
            return None
        self._phases.windows.take_snapshot("out of memory")
        return line

    def _record_exception(self, error: BaseException) -> None:
        if self._exits is not None:
            self._exits.record_exception(error)

    def _record_early_exception(self, error: BaseException) -> None:
        """Open the log of a rank that fails before it trains or joins; an open log has its own exception hook.

        A process that a rank started inherits RANK; the log of that rank already exists then. A launcher may have the
        RANK of its node, as operators of Kubernetes set it, and fails where a rank has failed.
        """
        from dtprof import launchers  # only here: most ranks start without it, and it takes milliseconds

        if launchers.is_launcher(sys.orig_argv):
            return
        folder = paths.rank_folder_name(_number("RANK", 0), _number("TORCHELASTIC_RESTART_COUNT", 0))
        if self._exits is None and not (self._run / folder).exists() and self.recorder(trains=False) is not None:
            self._record_exception(error)

    @fence.fenced("the exit of this process")
    def _mark_leaving(self) -> None:
        """Record the line at which a rank calls sys.exit or os._exit; not in processes that it forked."""
        if self._recorder is not None:
            span = self._recorder.begin_span(self._recorder.name_id(events.LEAVING), False)
            self._recorder.end_span(span, False, 0, False)

    def _hook_init(self) -> None:
        """Open the log before the rendezvous: a rank that hangs there has a record of its wait."""
        import torch.distributed.distributed_c10d as c10d

        original = c10d.init_process_group
        bind = inspect.signature(original).bind_partial

        @fence.stands_in
        @functools.wraps(original)
        def init_process_group(*arguments: Any, **options: Any) -> Any:
            span = self._begin_init(lambda: bind(*arguments, **options).arguments)
            failed = True
            try:
                result = original(*arguments, **options)
                failed = False
                return result
            except BaseException as error:
                fence.hide_frame(error)
                raise
            finally:
                self._end_init(span, failed)

        replace_copies(
            original, "init_process_group", init_process_group
        )  # torch.distributed.device_mesh imported it by name

    @fence.fenced("init_process_group")
    def _begin_init(self, given: Callable[[], Mapping[str, Any]]) -> int:
        options = given()
        rank, world_size = options.get("rank", -1), options.get("world_size", -1)
        if self._recorder is None:
            if rank < 0:
                rank = _number("RANK", -1)
            if world_size < 0:
                world_size = _number("WORLD_SIZE", -1)
            if rank < 0 or world_size < 0:
                return 0  # the rendezvous assigns them; `_end_init` opens the log
            if not self._gave_up:
                self._open(rank=rank, world_size=world_size)
        recorder = self._recorder
        return recorder.begin_span(recorder.name_id(events.INIT), False) if recorder is not None else 0

    @fence.fenced("init_process_group")
    def _end_init(self, span: int | None, failed: bool) -> None:
        import torch.distributed as dist

        if self._recorder is None and not failed and not self._gave_up:
            self._open(rank=dist.get_rank(), world_size=dist.get_world_size())
        if self._recorder is not None:
            if span:
                self._recorder.end_span(span, failed, 0, False)
            if not failed:
                self._recorder.write_entry(entry("feature", name=f"backend:{dist.get_backend()}"))
                if note := find_unusable_gpu():
                    self._recorder.write_entry(timed_entry("note", text=note))


def find_unusable_gpu() -> str | None:
    """Say that this machine has a GPU that this build of torch cannot use; None where it has none, or can."""
    import torch

    from dtprof.capture.native import build

    if not build.NVIDIA_DRIVER.exists() or torch.version.cuda is not None:
        return None
    return (
        f"torch {torch.__version__} is built without CUDA: the NVIDIA GPUs of this machine are not used. Where that is "
        "not meant, install a build of torch for CUDA"
    )


@fence.fenced("the stack of this process", "may not be readable")
def _allow_stack_sampling() -> None:
    """Let the watcher of `dtprof run`, and no other process, sample stacks where the kernel restricts ptrace (Yama)."""
    watcher = _number(settings.ENV_WATCHER_PID, 0)
    if watcher > 0:
        ctypes.CDLL(None).prctl(PR_SET_PTRACER, ctypes.c_ulong(watcher), 0, 0, 0)  # EINVAL without Yama is harmless


def _process_fields(torch_version: str) -> dict[str, object]:
    """Return the fields that identify this process."""
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "host": writer.host_name(),
        "boot_id": writer.boot_id(),
        "env_rank": os.environ.get("RANK"),
        "is_child": multiprocessing.parent_process() is not None,
        "command": list(getattr(sys, "orig_argv", sys.argv))[:64],
        "python": platform.python_version(),
        "torch": torch_version,
        "dtprof": __version__,
        "monotonic_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        "realtime_ns": time.clock_gettime_ns(time.CLOCK_REALTIME),
    }


def _rendezvous() -> str | None:
    """Return the rendezvous of the ranks of this process, which differs between replicas of a job; None: unknown."""
    if name := os.environ.get("REPLICA_GROUP_ID"):
        return f"{REPLICA_GROUP}{name}"  # of torchft
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    return f"{address}:{port}" if address and port else None


def _number(name: str, default: int) -> int:
    text = os.environ.get(name, "")
    return int(text) if text.lstrip("-").isdigit() else default


@fence.fenced("anything")
def arm() -> None:
    """Arm this process for the run that the environment names."""
    run = os.environ.get(settings.ENV_RUN_DIR, "")
    if run and Path(run).is_dir():
        Process(Path(run)).arm()
