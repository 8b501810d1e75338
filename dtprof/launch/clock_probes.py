"""Measure this host's clock against that of the launcher that created the run, by small UDP packets between launchers.

The job's processes and process groups are not touched. The launcher that created the run answers; every other one asks
a few times in a row, at the start, every ten seconds, and at the end, and keeps the exchange with the shortest round
trip: the offset is ((t1-t0)+(t2-t3))/2, wrong by half the round trip at most.
"""

import dataclasses
import json
import os
import secrets
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dtprof import fence
from dtprof.launch.launcher_thread import LauncherThread
from dtprof.records import paths, writer

MAGIC = b"DTPCLOCK"
TOKEN_BYTES = 16
PACKET = struct.Struct("!8s16sIqqq")
"""Magic, token of the run, number, and the times t0, t1, t2: an answer is as long as its question."""
ROUNDS = 16
ROUND_TIMEOUT_S = 1.0
MOST_LOST = 3
"""Unanswered questions, from the first on, after which an address is given up."""
EVERY_S = 10.0
STOP_S = 2.0

Clock = Callable[[], int]


def monotonic_ns() -> int:
    """Return the host's time, as in the records of the ranks."""
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


@dataclass(frozen=True, kw_only=True)
class Address:
    """The address of the launcher that answers for the clock of a run."""

    hosts: tuple[str, ...]
    port: int
    token: bytes


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The exchange with the shortest round trip."""

    t_ns: int  # of this host, halfway through
    offset_ns: float
    round_trip_ns: int
    rounds: int  # answered
    host: str  # the name or address that answered

    @property
    def error_ns(self) -> float:
        """Return the largest possible error of the offset: one of the two ways took the whole round trip."""
        return self.round_trip_ns / 2


class Responder:
    """Answers with this host's clock until it is closed."""

    def __init__(self, *, bind: tuple[str, int] = ("", 0), token: bytes, clock: Clock = monotonic_ns) -> None:
        """Open the socket and answer from now on.

        Raises:
            OSError: the address is in use, or of another host.
        """
        self._token, self._clock = token, clock
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            self._socket.bind(bind)
        except OSError:
            self._socket.close()
            raise
        self.port: int = self._socket.getsockname()[1]
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._work, name="dtprof-clock", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._wake.send(b"x")
        self._thread.join()
        for opened in (self._socket, self._wake, self._woken):
            opened.close()

    @fence.fenced("the clock of this host", "is no longer sent to other hosts")
    def _work(self) -> None:
        while True:
            readable, _, _ = select.select([self._socket, self._woken], [], [])
            if self._woken in readable:
                return
            try:
                packet, sender = self._socket.recvfrom(PACKET.size + 1)
                received_ns = self._clock()
                if len(packet) != PACKET.size:
                    continue
                magic, token, number, t0, _, _ = PACKET.unpack(packet)
                if magic == MAGIC and secrets.compare_digest(token, self._token):
                    answer = PACKET.pack(MAGIC, token, number, t0, received_ns, self._clock())
                    self._socket.sendto(answer, sender)
            except OSError:
                continue  # the other launcher has gone


def measure(address: Address, *, rounds: int = ROUNDS) -> Measurement | None:
    """Measure the clock at an address; return None where no host of it answers."""
    for host in address.hosts:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(ROUND_TIMEOUT_S)
            try:
                sock.connect((host, address.port))
                measured = _measure(sock, host, address.token, rounds)
            except OSError:
                continue
            if measured is not None:
                return measured
    return None


def _measure(sock: socket.socket, host: str, token: bytes, rounds: int) -> Measurement | None:
    best: tuple[int, int, float] | None = None  # round trip, time, offset
    answered = lost = 0
    for number in range(rounds):
        t0 = monotonic_ns()
        sock.send(PACKET.pack(MAGIC, token, number, t0, 0, 0))
        try:
            while True:
                packet = sock.recv(PACKET.size + 1)
                t3 = monotonic_ns()
                if len(packet) == PACKET.size and PACKET.unpack(packet)[:4] == (MAGIC, token, number, t0):
                    break
        except TimeoutError:
            lost += 1
            if lost >= MOST_LOST and not answered:
                return None
            continue
        answered += 1
        t1, t2 = PACKET.unpack(packet)[4:]
        exchange = (max(0, (t3 - t0) - (t2 - t1)), (t0 + t3) // 2, ((t1 - t0) + (t2 - t3)) / 2)
        best = exchange if best is None else min(best, exchange)
    if best is None:
        return None
    return Measurement(t_ns=best[1], offset_ns=best[2], round_trip_ns=best[0], rounds=answered, host=host)


class ClockKeeper:
    """Answers for the clock of this launcher, or measures it against the launcher that answers."""

    def __init__(self, node_folder: Path, *, host: str, responder: Responder | None, address: Address | None) -> None:
        """Write whose clock this is; with an address measure it now and every ten seconds."""
        self._file = node_folder / paths.CLOCK
        self._responder, self._address = responder, address
        self._thread = LauncherThread(self._work, "clock")
        self._write({"host": host, "boot_id": writer.boot_id(), "is_reference": address is None})
        if address is not None:
            self._thread.start()

    def stop(self) -> None:
        """Measure a last time; stop answering."""
        self._thread.stop(STOP_S)
        if self._responder is not None:
            self._responder.close()

    @fence.fenced("the clock of this host", "is no longer measured")
    def _work(self) -> None:
        assert self._address is not None
        ended = self._thread.ended
        while True:
            is_last = ended.is_set()
            measured = measure(self._address)
            if measured is not None:
                self._address = dataclasses.replace(self._address, hosts=(measured.host,))
                self._write(
                    {
                        "t_ns": measured.t_ns,
                        "offset_ns": measured.offset_ns,
                        "error_ns": measured.error_ns,
                        "round_trip_ns": measured.round_trip_ns,
                        "rounds": measured.rounds,
                    }
                )
            if is_last:
                return
            ended.wait(EVERY_S)

    def _write(self, entry: dict[str, object]) -> None:
        try:
            writer.append_line(self._file, entry)
        except OSError:
            self._thread.ended.set()  # the disk is full, or the run was deleted: the watcher reports it


def start(run: Path, *, is_reference: bool, answers: bool) -> ClockKeeper:
    """Start the clock of this launcher: the creator of the run answers where others may join, the others measure."""
    host = writer.host_name()
    return ClockKeeper(
        run / paths.node_folder_name(host),
        host=host,
        responder=serve(run) if is_reference and answers else None,
        address=None if is_reference else read_address(run),
    )


def serve(run: Path) -> Responder | None:
    """Answer for the clock of a run that this launcher created, and write the address into the run."""
    token = secrets.token_bytes(TOKEN_BYTES)
    try:
        responder = Responder(token=token)
        writer.write_json(
            run / paths.CLOCK_ADDRESS,
            {"hosts": _local_addresses(), "port": responder.port, "token": token.hex(), "pid": os.getpid()},
        )
    except OSError:
        return None
    return responder


def read_address(run: Path) -> Address | None:
    """Return the address of the clock of a run; None where there is none."""
    try:
        document = json.loads((run / paths.CLOCK_ADDRESS).read_text(encoding="utf-8"))
        token = bytes.fromhex(document["token"])
        return Address(hosts=tuple(map(str, document["hosts"])), port=int(document["port"]), token=token)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _local_addresses() -> list[str]:
    """Return the names and addresses by which other hosts may reach this host, loopback last."""
    import psutil

    names = [socket.gethostname()]
    for addresses in psutil.net_if_addrs().values():
        names += [entry.address for entry in addresses if entry.family == socket.AF_INET]
    return sorted(dict.fromkeys(names), key=lambda name: name.startswith("127."))
