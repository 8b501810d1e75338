"""Record how processes end: exceptions and orderly exits of this process, exit statuses of its children."""

import atexit
import contextlib
import functools
import importlib
import multiprocessing.process
import multiprocessing.util
import os
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from dtprof import fence
from dtprof.capture.call_sites import CodeOwners
from dtprof.capture.frameworks.imports import after_import
from dtprof.capture.recorder import Recorder
from dtprof.capture.string_entries import timed_entry
from dtprof.records import paths, writer

MAX_TRACEBACK = 32_768
_RAY = "ray.train.v2._internal.execution.worker_group.thread_runner"
MAX_THREAD_EXCEPTIONS = 16
"""Exceptions of threads that are recorded of a process: a program that starts one for each item may end many."""


class ExitWriter:
    """Writes exceptions and the orderly exit of a rank into its strings file."""

    def __init__(self, recorder: Recorder, owners: CodeOwners, describe: Callable[[BaseException], str | None]) -> None:
        """Record for this process; `describe` returns a further entry for an exception, or None."""
        self._describe = describe
        self._recorder = recorder
        self._owners = owners
        self._pid = os.getpid()
        self._ended = False
        self._num_thread_exceptions = 0

    @fence.fenced("the exit of this process")
    def install(self) -> None:
        """Chain to the exception hook, and hook the interpreter's exit, also in multiprocessing's children."""
        record_uncaught(self.record_exception)
        self._watch_threads()
        atexit.register(self.record_end)
        multiprocessing.util.Finalize(self, self.record_end, exitpriority=-100)

    @fence.fenced("an exception")
    def record_exception(self, error: BaseException) -> None:
        """Write an uncaught exception with the innermost line of the user's code."""
        if os.getpid() != self._pid:
            return
        self._write("exception", error)
        if line := self._describe(error):
            self._recorder.write_entry(line)

    def _watch_threads(self) -> None:
        """Record the exceptions that end threads beside the main one, then call the hook set before."""
        previous = threading.excepthook

        def excepthook(ended: threading.ExceptHookArgs, /) -> None:
            self.record_thread_exception(ended)
            previous(ended)

        threading.excepthook = excepthook

    @fence.fenced("an exception of a thread")
    def record_thread_exception(self, ended: threading.ExceptHookArgs) -> None:
        """Write the exception that ended a thread; `SystemExit` ends one in order."""
        error = ended.exc_value
        if os.getpid() != self._pid or error is None or isinstance(error, SystemExit):
            return
        self._num_thread_exceptions += 1
        if self._num_thread_exceptions <= MAX_THREAD_EXCEPTIONS:
            self._write("thread_exception", error, thread=ended.thread.name if ended.thread is not None else "")

    def _write(self, kind: str, error: BaseException, **more: str) -> None:
        frames = traceback.extract_tb(error.__traceback__)
        of_user = [
            f for f in frames if not self._owners.is_tool(f.filename) and not self._owners.is_library(f.filename)
        ]
        frame = next(reversed(of_user or frames), None)
        text = "".join(traceback.format_exception(error))
        self._recorder.write_entry(
            timed_entry(
                kind,
                **more,
                type=type(error).__qualname__,
                message=_message_of(error),
                traceback=text[-MAX_TRACEBACK:],
                frame=frame and {"file": frame.filename, "line": frame.lineno, "function": frame.name},
            )
        )

    @fence.fenced("the exit of this process")
    def record_end(self) -> None:
        """Write the exit record of an interpreter that exits in order."""
        if self._ended or os.getpid() != self._pid:
            return
        self._ended = True
        self._recorder.write_entry(timed_entry("exit", how="interpreter", code=None))
        self._recorder.close_log()


def _message_of(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except Exception as raised:  # noqa: BLE001  # __str__ of the program's exception may raise anything
        return f"(its text cannot be had: {type(raised).__name__})"


@fence.fenced("the exit of this process")
def record_uncaught(record: Callable[[BaseException], None]) -> None:
    """Record the exception that ends the program, then call the hook set before."""
    previous = sys.excepthook

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        record(error)
        previous(kind, error, trace)

    sys.excepthook = excepthook


@fence.fenced("the exit of this process")
def watch_leaving(mark: Callable[[], None]) -> None:
    """Record calls that end the process, SIGKILL to itself included: their line says where a rank exited."""
    for module, name in ((sys, "exit"), (os, "_exit")):
        original = getattr(module, name)
        if not isinstance(original, types.FunctionType):  # a forked process inherits the hook of its parent
            setattr(module, name, _marking(original, module.__name__, mark))
    for owner, name, native, kills in (
        (os, "kill", "posix", lambda pid, number: pid in (0, os.getpid()) and number == signal.SIGKILL),
        (os, "killpg", "posix", lambda group, number: group in (0, os.getpgrp()) and number == signal.SIGKILL),
        (signal, "raise_signal", "_signal", lambda number: number == signal.SIGKILL),
    ):
        original = getattr(owner, name)
        if not isinstance(original, types.FunctionType):
            setattr(owner, name, _marking(original, native, mark, is_marked=kills))


def _marking(
    leave: Callable[..., Any],
    module: str,
    mark: Callable[[], None],
    *,
    is_marked: Callable[..., bool] = lambda *_, **__: True,
) -> Callable[..., Any]:
    def marked(*arguments: Any, **options: Any) -> Any:
        with contextlib.suppress(TypeError):  # of a wrong call, which raises below
            if is_marked(*arguments):
                mark()
        return leave(*arguments, **options)

    # pickle looks it up by these names, as the target of a process for example.
    marked.__module__, marked.__name__, marked.__qualname__ = module, leave.__name__, leave.__qualname__
    marked.__doc__ = leave.__doc__
    return marked


@fence.fenced("the exceptions of spawned ranks")
def record_spawned_exceptions(record: Callable[[BaseException], None]) -> None:
    """Record the exceptions of ranks started from Python, which never reach the exception hook."""
    process: Any = multiprocessing.process.BaseProcess
    process.run = _recording(process.run, record)
    spawn: Any = importlib.import_module("torch.multiprocessing.spawn")
    original = spawn._wrap

    def wrap(fn: Callable[..., Any], i: int, args: Any, error_file: str) -> None:
        original(_recording(fn, record), i, args, error_file)

    wrap.__qualname__, wrap.__name__, wrap.__module__ = original.__qualname__, original.__name__, original.__module__
    spawn._wrap = wrap
    after_import(_RAY, functools.partial(_record_in_workers, record))


@fence.fenced("the exceptions of workers of Ray Train")
def _record_in_workers(record: Callable[[BaseException], None], module: Any) -> None:
    """Record what ends the function of a worker of Ray Train, which catches it and tells its controller."""
    runner = module.ThreadRunner
    original = runner.run

    @fence.stands_in
    @functools.wraps(original)
    def run(self: Any, target: Callable[..., Any]) -> Any:
        return original(self, _recording(target, record))

    runner.run = run


def _recording(function: Callable[..., Any], record: Callable[[BaseException], None]) -> Callable[..., Any]:
    @fence.stands_in
    @functools.wraps(function)
    def recorded(*arguments: Any, **options: Any) -> Any:
        try:
            return function(*arguments, **options)
        except BaseException as error:
            fence.hide_frame(error)
            if not isinstance(error, SystemExit):
                record(error)
            raise

    return recorded


@fence.fenced("the exit statuses of child processes")
def record_children(node_folder: Path) -> None:
    """Write the exit status of every child process that Python reaps, as the kernel gave it.

    Only the parent of a rank under torchrun or torch.multiprocessing learns how the rank ended.
    """
    import multiprocessing.popen_fork as popen_fork
    import multiprocessing.popen_forkserver as popen_forkserver
    import subprocess

    file = node_folder / paths.EXITS
    reap: Any = subprocess.Popen._handle_exitstatus  # type: ignore[attr-defined]

    @fence.fenced("the exit status of a child process")
    def write(pid: int, status: int | None) -> None:
        # A negative status is the signal that ended the child, as in subprocess.
        now = time.clock_gettime_ns(time.CLOCK_MONOTONIC)
        if not node_folder.exists():
            return  # the run was moved or deleted, which the launcher reports
        writer.append_line(file, {"pid": pid, "status": status, "t_ns": now, "by": os.getpid()})

    def handle_exitstatus(self: Any, sts: int, *rest: Any, **options: Any) -> None:
        reap(self, sts, *rest, **options)
        write(self.pid, self.returncode)

    def watch(popen: Any) -> None:
        poll = popen.poll

        def polled(self: Any, *arguments: Any, **options: Any) -> int | None:
            known = self.returncode is not None
            status: int | None = poll(self, *arguments, **options)
            if not known and status is not None:
                write(self.pid, status)
            return status

        popen.poll = polled

    subprocess.Popen._handle_exitstatus = handle_exitstatus  # type: ignore[attr-defined]
    watch(popen_fork.Popen)  # and of spawn, which inherits it
    watch(popen_forkserver.Popen)
