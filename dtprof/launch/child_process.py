"""Run one command as a child in the same terminal: signals, status and standard streams pass through untouched."""

import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from dtprof import fence

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
LOST_S = 1.0
"""Longest delay after a signal that arrived just before the wait."""
LAST_TICK_S = 2.0
"""How long the end of a job waits for a running tick."""
SENT_BY_KERNEL = 0x80  # si_code of a signal from the terminal, which the child has had as well


@contextmanager
def signals_held() -> Iterator[None]:
    """Block signals while starting threads before the command: delivered to one of them, a signal would end dtprof.

    Importing a library that starts threads counts, too.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*FORWARDED, signal.SIGCHLD])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Child:
    """A running command."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], *, stdout: int = 1) -> None:
        """Start the command with the signal mask and dispositions that this process had.

        Parameters:
            command: what to execute.
            environment: all of its variables.
            stdout: the open file that its standard output is; 2 where this process's own output is a result.

        Raises:
            OSError: it cannot be executed.
        """
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*FORWARDED, signal.SIGCHLD])
        try:
            self.pid = os.posix_spawnp(
                command[0],
                list(command),
                environment,
                file_actions=[(os.POSIX_SPAWN_DUP2, stdout, 1)] if stdout != 1 else [],
                setsigmask=self._old_mask,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them; the command must not inherit that
            )
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
            raise
        self.status: int | None = None
        self._reaping = threading.Lock()  # the kernel may reuse a reaped pid

    def wait(self, tick: Callable[[], None], *, period_s: float = 0.5) -> int:
        """Wait for the end and forward signals; return the exit status, negative for a signal.

        A thread calls `tick` about every period, so that a slow tick delays no signal.
        """
        ended = threading.Event()
        ticker = threading.Thread(target=_tick, args=(tick, ended, period_s), name="dtprof-watcher", daemon=True)
        try:
            ticker.start()
        except RuntimeError as error:  # the limit of threads is reached
            fence.report("the watch over the job", error, "is not started")
        while not self._reap():
            info = signal.sigtimedwait([*FORWARDED, signal.SIGCHLD], LOST_S)
            if info is not None and info.si_signo != signal.SIGCHLD and info.si_code != SENT_BY_KERNEL:
                self.send(info.si_signo)
        ended.set()
        if ticker.is_alive():
            ticker.join(LAST_TICK_S)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        assert self.status is not None
        return self.status

    def _reap(self) -> bool:
        with self._reaping:
            if self.status is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid == self.pid:
                    self.status = os.waitstatus_to_exitcode(status)
            return self.status is not None

    def send(self, number: int) -> None:
        """Send a signal, if the child is still there."""
        with self._reaping:
            if self.status is None:
                os.kill(self.pid, number)


def _tick(tick: Callable[[], None], ended: threading.Event, period_s: float) -> None:
    while not ended.wait(period_s):
        tick()


def end_like(status: int) -> int:
    """Return the exit status to end with; where the child died of a signal, die of the same one."""
    if status >= 0:
        return status
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core file of dtprof would hide that of the child
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
    os.kill(os.getpid(), -status)
    return 128 - status
