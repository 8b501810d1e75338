"""The ranks of a probe meet in the store of the launch: they exchange what they know, and try their networks."""

import datetime
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from dtprof import fence
from dtprof.launch import clock_probes
from dtprof.records import rank_probes
from dtprof.records.rank_probes import RankProbe

CONNECT_TIMEOUT_S = 3.0
MOST_HOSTS_TRIED = 64
MOST_RANKS_READ = 2048


class Deadline:
    """A time by which a stage of the probe ends."""

    def __init__(self, seconds: float) -> None:
        """Begin now."""
        self._end = time.monotonic() + seconds

    def left_s(self) -> float:
        """Return the seconds left, at least a hundredth."""
        return max(0.01, self._end - time.monotonic())

    def is_over(self) -> bool:
        """Say whether it has passed."""
        return time.monotonic() >= self._end

    def span(self) -> datetime.timedelta:
        """Return the time left as torch takes it."""
        return datetime.timedelta(seconds=self.left_s())


class Rendezvous:
    """A store that all ranks of the launch share, with the keys of this probe."""

    def __init__(self, dist: Any, probe: RankProbe, deadline: Deadline) -> None:
        """Open the store as `init_process_group` of the program would.

        Raises:
            Exception: of torch; the store did not open in time.
        """
        os.environ.setdefault("RANK", str(probe.rank))  # of mpirun and srun: the rendezvous reads these
        os.environ.setdefault("WORLD_SIZE", str(probe.world_size))
        store, _, _ = next(dist.rendezvous("env://", probe.rank, probe.world_size, timeout=deadline.span()))
        self._store = dist.PrefixStore("dtprof-doctor", store)
        self.group_store = dist.PrefixStore("dtprof-doctor-group", store)
        self._rank, self._world_size = probe.rank, probe.world_size

    def put(self, key: str, text: str) -> None:
        """Set this rank's value under a key."""
        self._store.set(f"{key}/{self._rank}", text)

    def take(self, key: str, rank: int, deadline: Deadline) -> str | None:
        """Return a rank's value under a key; None where it did not come in time."""
        name = f"{key}/{rank}"
        try:
            self._store.wait([name], deadline.span())
            return bytes(self._store.get(name)).decode()
        except Exception:  # noqa: BLE001 - torch raises different ones, by version and back end
            return None

    def take_all(self, key: str, deadline: Deadline) -> dict[int, str]:
        """Return the values of all ranks that came in time."""
        ranks = range(min(self._world_size, MOST_RANKS_READ))
        found = {rank: self.take(key, rank, deadline) for rank in ranks}
        return {rank: text for rank, text in found.items() if text is not None}

    def agree(self, key: str, decide: Callable[[], bool], deadline: Deadline) -> bool:
        """Return what rank 0 decides, on all ranks; false where it does not say in time."""
        if self._rank == 0:
            self.put(key, str(int(decide())))
        return self.take(key, 0, deadline) == "1"


def publish(rendezvous: Rendezvous, probe: RankProbe) -> None:
    """Give this rank's document to the others."""
    rendezvous.put(f"facts-{probe.stage}", rank_probes.to_json(probe))


def read_probes(rendezvous: Rendezvous, stage: str, deadline: Deadline) -> list[RankProbe]:
    """Return the documents that the ranks published at a stage."""
    texts = rendezvous.take_all(f"facts-{stage}", deadline)
    return [rank_probes.parse_probe(json.loads(text)) for _, text in sorted(texts.items())]


class Listener:
    """Answers connections of the other hosts at the address that this host's traffic would use."""

    def __init__(self, probe: RankProbe) -> None:
        """Open a port."""
        self._socket = socket.create_server((choose_address(probe), 0))
        self._socket.settimeout(0.2)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Close the port."""
        self._ended.set()
        self._thread.join()
        self._socket.close()

    def _work(self) -> None:
        while not self._ended.is_set():
            with suppress(OSError):
                connection, _ = self._socket.accept()
                connection.close()


def choose_address(probe: RankProbe) -> str:
    """Return the address at which other hosts reach this one: of the interface that a variable names, else by route."""
    named = probe.settings.get("GLOO_SOCKET_IFNAME") or probe.settings.get("NCCL_SOCKET_IFNAME") or ""
    for name in named.lstrip("^=").split(","):
        for interface in probe.interfaces:
            if interface.name == name and interface.address:
                return interface.address
    for target in probe.master_addresses:
        with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.connect((target, 9))
            address = str(sock.getsockname()[0])
            if not address.startswith("127."):
                return address
    others = [one.address for one in probe.interfaces if one.address and not one.is_loopback and one.is_up]
    return others[0] if others else "127.0.0.1"


def try_hosts(probe: RankProbe, leaders: list[RankProbe]) -> None:
    """Connect to the listener of every other host, and note those that cannot be reached."""
    for other in leaders[:MOST_HOSTS_TRIED]:
        if other.host == probe.host or other.listens_at is None:
            continue
        address, _, port = other.listens_at.rpartition(":")
        try:
            socket.create_connection((address, int(port)), timeout=CONNECT_TIMEOUT_S).close()
        except OSError as error:
            probe.unreachable[other.host] = f"{address} ({error.strerror or error})"


class ClockReadings:
    """The clock of this host against that of rank 0's, at two times."""

    def __init__(self, probe: RankProbe, rendezvous: Rendezvous, deadline: Deadline) -> None:
        """Answer for rank 0's host, or measure a first time."""
        self._probe = probe
        self._responder: clock_probes.Responder | None = None
        self._first: clock_probes.Measurement | None = None
        self._address: clock_probes.Address | None = None
        if probe.rank == 0:
            token = secrets.token_bytes(clock_probes.TOKEN_BYTES)
            try:
                self._responder = clock_probes.Responder(token=token)
            except OSError as error:
                probe.clock_reason = f"no UDP port can be opened ({error.strerror})"
                rendezvous.put("clock", "null")
                return
            place = {"host": choose_address(probe), "port": self._responder.port, "token": token.hex()}
            rendezvous.put("clock", json.dumps({**place, "wall_minus_monotonic_ns": _wall_minus_monotonic_ns()}))
            probe.clock_offset_ns = probe.clock_error_ns = probe.wall_offset_ns = 0.0
            return
        document = json.loads(rendezvous.take("clock", 0, deadline) or "null")
        if document is None:
            probe.clock_reason = "rank 0's host does not answer for its clock"
            return
        self._wall = int(document["wall_minus_monotonic_ns"])
        self._address = clock_probes.Address(
            hosts=(document["host"],), port=document["port"], token=bytes.fromhex(document["token"])
        )
        self._first = clock_probes.measure(self._address)
        if self._first is None:
            probe.clock_reason = f"no answer over UDP from {document['host']}"
            return
        self._take(self._first)

    @fence.fenced("the clock of this host", "is not measured again")
    def measure_again(self) -> None:
        """Measure a last time; the difference over the time between is the drift."""
        if self._address is None or self._first is None:
            return
        last = clock_probes.measure(self._address)
        if last is None or last.t_ns <= self._first.t_ns:
            return
        elapsed_ns = last.t_ns - self._first.t_ns
        self._probe.clock_drift_ppm = (last.offset_ns - self._first.offset_ns) / elapsed_ns * 1e6
        self._probe.clock_drift_error_ppm = (last.error_ns + self._first.error_ns) / elapsed_ns * 1e6
        if last.error_ns < self._first.error_ns:
            self._take(last)

    def close(self) -> None:
        """Stop answering."""
        if self._responder is not None:
            self._responder.close()

    def _take(self, measured: clock_probes.Measurement) -> None:
        probe = self._probe
        probe.clock_offset_ns, probe.clock_error_ns = measured.offset_ns, measured.error_ns
        probe.wall_offset_ns = measured.offset_ns + self._wall - _wall_minus_monotonic_ns()


def _wall_minus_monotonic_ns() -> int:
    return time.time_ns() - clock_probes.monotonic_ns()
