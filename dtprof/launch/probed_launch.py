"""Start the command of a job with the probe in its ranks' place, for a limited time."""

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from dtprof import settings
from dtprof.analysis.doctor.doctor_case import Endpoint
from dtprof.launch import announcement, interpreter, job_launch
from dtprof.launchers import ADDRESS, ENDPOINT, PORT, find_option

GRACE_S = 10.0
"""How long after the ranks' own time the launcher may take to start them and to end."""


def probe_launch(command: Sequence[str], folder: Path, *, seconds: float) -> int | None:
    """Run the command; return its exit status, or None where it was stopped when the time was up.

    Raises:
        CommandNotFoundError: the command cannot be started.
    """
    job_launch.check_command(command[0])
    environment = dict(os.environ)
    environment["PYTHONPATH"] = interpreter.injected_path(environment.get("PYTHONPATH", ""))
    for name in settings.OF_A_JOB:
        environment.pop(name, None)
    environment[settings.ENV_PROBE_DIR] = str(folder)
    environment[settings.ENV_PROBE_SECONDS] = f"{seconds:g}"
    environment[settings.ENV_PROBE_PORT] = str(_free_port())
    announced = announcement.announce(environment)
    ended = time.monotonic() + seconds + GRACE_S
    stopped = False
    process = job_launch.start(command, environment, stdout=2)

    def stop_when_over() -> None:
        nonlocal stopped
        now = time.monotonic()
        if now > ended + GRACE_S:
            process.send(signal.SIGKILL)
        elif now > ended and not stopped:
            stopped = True
            process.send(signal.SIGTERM)

    status = process.wait(stop_when_over)
    announcement.withdraw(announced)
    _end_leftovers(folder)
    return None if stopped else status


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def _end_leftovers(folder: Path) -> None:
    """Kill what the launcher left behind: processes of this host that were started for this folder."""
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(settings.ENV_PROBE_DIR) == str(folder):
                process.kill()


def find_endpoint(command: Sequence[str], environment: Mapping[str, str]) -> Endpoint | None:
    """Return where the hosts of this launch meet, before the launch; None where the command does not say.

    Options of torchrun, accelerate and deepspeed come before MASTER_ADDR and MASTER_PORT. A launch of one host that
    chooses its own address and port (--standalone) has none.
    """
    host = find_option(command, ENDPOINT.pattern) or find_option(command, ADDRESS.pattern)
    port = find_option(command, PORT.pattern)
    if host is not None and port is None and host.rpartition(":")[2].isdecimal() and ":" in host:
        host, _, port = host.rpartition(":")
    is_launcher_of_own = "--standalone" in command
    if host is None and not is_launcher_of_own:
        host = environment.get("MASTER_ADDR")
    if port is None and host is not None and not is_launcher_of_own:
        port = environment.get("MASTER_PORT")
    if port is not None and host is None and not is_launcher_of_own:
        host = "localhost"
    if host is None:
        return None
    number = int(port) if port is not None and port.isdecimal() and 0 < int(port) < 65536 else None
    return _examine(host.strip("[]"), number)


def _examine(host: str, port: int | None) -> Endpoint:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return Endpoint(host=host, port=port, error=str(getattr(error, "strerror", None) or error))
    addresses = {str(entry[4][0]) for entry in found}
    own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
    is_local = any(address in own or address.startswith("127.") for address in addresses)
    return Endpoint(host=host, port=port, is_local=is_local, taken_by=_listener(port) if is_local and port else None)


def _listener(port: int) -> str | None:
    """Say who listens at a port of this host; None: nobody."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("", port))
        except PermissionError:
            return None
        except OSError:
            pass
        else:
            return None
    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens_at = getattr(connection.laddr, "port", None) if connection.status == psutil.CONN_LISTEN else None
            if listens_at == port and connection.pid:
                return f"by process {connection.pid}, {psutil.Process(connection.pid).name()}"
    return "by another process"
