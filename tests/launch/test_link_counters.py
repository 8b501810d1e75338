"""What the kernel counts of connections to other hosts: own processes alone, totals that outlive a connection."""

import os
import socket

import pytest

from dtprof.launch import link_counters
from dtprof.launch.link_counters import Connection, LinkCounters, own_addresses, queued_bytes, read_connections


def connection(**values: float | str) -> Connection:
    """Return a connection to 10.0.0.2."""
    facts = {"acked_bytes": 1000, "busy_s": 0.5, "segments": 2, "retransmitted": 0, "rtt_s": 1e-3, "min_rtt_s": 1e-4}
    return Connection(**({"address": "10.0.0.2"} | facts | values))  # type: ignore[arg-type]


def test_totals_go_on_when_a_connection_ends_and_those_of_other_processes_do_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = [(11, connection()), (12, connection(acked_bytes=9e9)), (13, connection(address="10.0.0.1"))]
    monkeypatch.setattr(link_counters, "own_addresses", lambda: ["10.0.0.1"])
    monkeypatch.setattr(link_counters, "read_connections", lambda: list(seen))
    monkeypatch.setattr(link_counters, "_sockets_of", lambda _: {11, 14})
    counters = LinkCounters()
    assert counters.sample([1]) == {"10.0.0.2": [1000, 0.5, 2, 0, 1e-3, 1e-4]}
    seen[:] = [(14, connection(acked_bytes=50, busy_s=0.25, segments=1, retransmitted=1, rtt_s=0.5))]
    assert counters.sample([1]) == {"10.0.0.2": [1050, 0.75, 3, 1, 0.5, 1e-4]}
    seen[:] = [(14, connection(acked_bytes=150, busy_s=0.5, segments=2, retransmitted=1))]
    assert counters.sample([1]) == {"10.0.0.2": [1150, 1.0, 4, 1, 1e-3, 1e-4]}


def test_a_kernel_that_tells_nothing_gives_no_links(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(socket, "socket", refuse)
    assert LinkCounters().sample([os.getpid()]) == {}
    assert queued_bytes() is None


def test_the_kernel_counts_what_a_connection_has_sent() -> None:
    address = next((one for one in own_addresses() if ":" not in one), None)
    if address is None:
        pytest.skip("this machine has no address but the loopback's")
    try:
        list(read_connections())
    except OSError as error:
        pytest.skip(f"no statistics of connections here: {error}")
    with (
        socket.create_server((address, 0)) as server,
        socket.create_connection(server.getsockname()) as client,
        server.accept()[0] as accepted,
    ):
        client.sendall(b"x" * 5000)
        taken = 0
        while taken < 5000:
            taken += len(accepted.recv(5000))
        seen = dict(read_connections())[os.fstat(client.fileno()).st_ino]
        assert link_counters._sockets_of([os.getpid()]) >= {os.fstat(client.fileno()).st_ino}
    assert (seen.address, seen.retransmitted) == (address, 0)
    assert 5000 <= seen.acked_bytes <= 5001  # the first packet counts as a byte
    assert 0 <= seen.min_rtt_s <= seen.rtt_s < 10
    assert seen.segments >= 1
    assert (queued_bytes() or 0) >= 0
