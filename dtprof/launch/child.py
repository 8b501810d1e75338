"""Run one command as a child in the same terminal: signals, status and standard streams pass through untouched."""

import os
import resource
import signal
import time
from collections.abc import Callable, Sequence

FORWARDED = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
SENT_BY_KERNEL = 0x80  # si_code of a signal from the terminal, which the child has had as well


class Child:
    """A running command."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        """Start the command with the signal mask and dispositions that this process had.

        Raises:
            OSError: it cannot be executed.
        """
        self._old_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [*FORWARDED, signal.SIGCHLD])
        try:
            self.pid = os.posix_spawnp(
                command[0],
                list(command),
                environment,
                setsigmask=self._old_mask,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],  # Python ignores them; the command must not inherit that
            )
        except OSError:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
            raise
        self.status: int | None = None

    def wait(self, tick: Callable[[], None], *, period_s: float = 0.5) -> int:
        """Wait for the end, calling `tick` about every period; return the exit status, negative for a signal."""
        next_tick = time.monotonic() + period_s
        while not self._reap():
            timeout = max(0.0, next_tick - time.monotonic())
            info = signal.sigtimedwait([*FORWARDED, signal.SIGCHLD], timeout)
            if info is not None and info.si_signo != signal.SIGCHLD and info.si_code != SENT_BY_KERNEL:
                self.send(info.si_signo)
            if time.monotonic() >= next_tick:
                tick()
                next_tick = time.monotonic() + period_s
        signal.pthread_sigmask(signal.SIG_SETMASK, self._old_mask)
        assert self.status is not None
        return self.status

    def _reap(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid == self.pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def send(self, number: int) -> None:
        """Send a signal, if the child is still there."""
        if self.status is None:
            os.kill(self.pid, number)


def end_like(status: int) -> int:
    """Return the exit status to end with; where the child died of a signal, die of the same one."""
    if status >= 0:
        return status
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the child has left its core, ours would hide it
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [-status])
    os.kill(os.getpid(), -status)
    return 128 - status
