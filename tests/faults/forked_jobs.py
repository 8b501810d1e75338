"""Run programs of the corpus as recorded jobs. Ranks are forked from this process, which has imported torch once.

Several seconds of CPU a rank are spared so. Each job is watched as `dtprof run --hang-after --on-hang stop` does; when
a rank fails, the others are ended as torchrun does.
"""

import atexit
import importlib
import os
import signal
import socket
import sys
import time
from pathlib import Path

from dtprof import settings
from dtprof.diagnosis.findings import Verdict
from dtprof.launch import hang_watcher, run_directory
from dtprof.launch.line_sampler import LineSampler
from dtprof.records import paths, writer
from dtprof.records.shared_follower import SharedFollower
from dtprof.session.job_recording import diagnose_stalled
from dtprof.session.run_diagnosis import diagnose_run
from tests.faults.corpus import Program, back_end

HANG_AFTER_S = 3.0
LOOK_S = 0.05
GRACE_S = 1.0
END = os._exit
"""Taken before ranks are recorded: that the runner ends them so is not part of the program."""
LIMIT_S = 120.0


def run(program: Program, folder: Path, *, library: str, device: str = "cpu") -> Verdict:
    """Run one program to its end and return the verdict on its records. The caller has no threads.

    Parameters:
        library: the native hook; empty: the hook in Python.
        device: where the program's tensors are made: `cpu`; `sim`, the simulated accelerator; or `cuda`, one GPU for
            all ranks.
    """
    folder.mkdir(parents=True)
    run_directory.create(folder, force=False)
    manifest = run_directory.RunManifest(folder, ["corpus", program.name], {"hang_after_s": str(HANG_AFTER_S)})
    os.environ |= {
        settings.ENV_RUN_DIR: str(folder),
        settings.ENV_NATIVE_HOOK: library,
        settings.CHECK.env: program.check,
    }
    port = _free_port()
    pids = {_fork(program, rank, port=port, folder=folder, device=device): rank for rank in range(program.ranks)}
    try:
        status, hang_ns = _watch(pids, folder, port)
    finally:
        for pid in pids:
            _send(pid, signal.SIGKILL)
            _end_session(pid)
    manifest.update(
        {
            "ended_realtime_ns": time.time_ns(),
            "ended_monotonic_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC),
            "exit_status": status,
            "stopped_on_hang": hang_ns is not None,
            "hang_detected_ns": hang_ns,
            "oom_kills": 0,
        }
    )
    return diagnose_run(folder)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _fork(program: Program, rank: int, *, port: int, folder: Path, device: str) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        with (folder.parent / f"{folder.name}.{rank}.log").open("wb") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        status = _be_rank(program, rank, port=port, device=device)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        END(status)


def _be_rank(program: Program, rank: int, *, port: int, device: str) -> int:
    import torch
    import torch.distributed as dist

    from dtprof.capture.arm import arm

    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(program.ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    if device == "sim":  # not in the parent: some of torch prefers an accelerator wherever there is one
        importlib.import_module("tests.accelerator.simulated_device")
        torch.set_default_device(device)
    elif device == "cuda":
        os.environ["NCCL_HOSTID"] = f"rank-{rank}"  # so that NCCL accepts a device that another rank uses
        os.environ["NCCL_MAX_NCHANNELS"] = "1"  # it connects sooner
        torch.set_default_device("cuda:0")
    arm()
    try:
        if program.joins:
            dist.init_process_group(back_end())
        program.body(rank)
        if program.joins:
            dist.destroy_process_group()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException as error:  # noqa: BLE001  # as the interpreter does at the top of a program
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
    else:
        status = 0
    atexit._run_exitfuncs()
    return status


def _watch(pids: dict[int, int], folder: Path, port: int) -> tuple[int, int | None]:
    """Return the exit status of the job, and when it was stopped for hanging."""
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    node = folder / paths.node_folder_name(writer.host_name())
    watch = hang_watcher.Watcher(
        run=folder, hang_after_s=_patience_s(), diagnose=diagnose_stalled, say=lambda text: print(text, file=sys.stderr)
    )
    sampler = LineSampler(SharedFollower(folder, boot_id=writer.boot_id()).subscribe(), node)
    running, status, hang_ns = set(pids), 0, None
    failed_s: float | None = None
    begun_s = time.monotonic()
    while running:
        time.sleep(LOOK_S)
        for pid in list(running):
            ended, code = os.waitpid(pid, os.WNOHANG)
            if ended:
                running.discard(pid)
                code = os.waitstatus_to_exitcode(code)
                now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
                writer.append_line(node / paths.EXITS, {"pid": pid, "status": code, "t_ns": now, "by": os.getpid()})
                if code:
                    status = status or 1
                    failed_s = failed_s or time.monotonic()
        if failed_s is not None and running:
            waited_s = time.monotonic() - failed_s
            if waited_s > GRACE_S:
                _send_all(running, signal.SIGKILL if waited_s > 5 * GRACE_S else signal.SIGTERM)
        elif running:
            watch.tick()
            if watch.hang is not None or time.monotonic() - begun_s > LIMIT_S:
                status, failed_s, hang_ns = 3, time.monotonic() - GRACE_S, watch.hang_detected_ns
    sampler.stop()
    del store
    return status, hang_ns


def _patience_s() -> float:
    """Return how long ranks may be silent: longer where the machine is busy with other things."""
    return HANG_AFTER_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def _send_all(pids: set[int], number: int) -> None:
    for pid in pids:
        _send(pid, number)


def _end_session(pid: int) -> None:
    """End what a rank started: a worker that waits for ever outlives it, and keeps the locks of this process."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _send(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
