"""Measuring a clock over real packets: the true offset lies within the error, whatever the clocks say."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dtprof.launch import clock_probes
from dtprof.launch.clock_probes import Address, ClockKeeper, Responder, measure, monotonic_ns
from dtprof.records import paths
from dtprof.records.nodes.host_clocks import host_clocks

TOKEN = b"t" * clock_probes.TOKEN_BYTES
AHEAD_NS = 7_000_000_000


@pytest.fixture
def ahead() -> Iterator[Address]:
    """Give the address of a clock that is 7 s ahead of this host's."""
    responder = Responder(bind=("127.0.0.1", 0), token=TOKEN, clock=lambda: monotonic_ns() + AHEAD_NS)
    yield Address(hosts=("127.0.0.1",), port=responder.port, token=TOKEN)
    responder.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "dtprof-clock"]


def test_true_offset_lies_within_the_error(ahead: Address) -> None:
    for _ in range(30):
        begin = monotonic_ns()
        found = measure(ahead)
        assert found is not None
        assert abs(found.offset_ns - AHEAD_NS) <= found.error_ns
        assert 0 < found.rounds <= clock_probes.ROUNDS
        assert begin < found.t_ns < monotonic_ns()
        assert 0 < found.round_trip_ns < 1_000_000_000


def test_drift_of_a_clock_is_measured(tmp_path: Path) -> None:
    begin = monotonic_ns()
    # A clock that gains 1 % is far beyond any real one, and beyond what packets on a busy machine blur.
    responder = Responder(bind=("127.0.0.1", 0), token=TOKEN, clock=lambda: round((monotonic_ns() - begin) * 1.01))
    address = Address(hosts=("127.0.0.1",), port=responder.port, token=TOKEN)
    try:
        first = measure(address)
        while monotonic_ns() < begin + 300_000_000:
            second = measure(address)
    finally:
        responder.close()
    assert first is not None
    assert second is not None
    gained = (second.offset_ns - first.offset_ns) / (second.t_ns - first.t_ns)
    blur = (first.error_ns + second.error_ns) / (second.t_ns - first.t_ns)
    assert gained == pytest.approx(0.01, abs=blur + 0.0002)
    assert tmp_path.exists()


def test_stranger_gets_no_answer_and_does_not_stop_others(ahead: Address) -> None:
    stranger = Address(hosts=ahead.hosts, port=ahead.port, token=b"x" * clock_probes.TOKEN_BYTES)
    assert measure(stranger, rounds=1) is None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for rubbish in (b"", b"x", b"y" * 1000):
            sock.sendto(rubbish, ("127.0.0.1", ahead.port))
    assert measure(ahead) is not None


def test_closed_port_and_unknown_host_are_passed_over(ahead: Address) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    assert measure(Address(hosts=("127.0.0.1",), port=port, token=TOKEN), rounds=2) is None
    both = Address(hosts=("no-such-host.invalid", "127.0.0.1"), port=ahead.port, token=TOKEN)
    assert measure(both) is not None


def test_launchers_leave_measurements_in_the_run_from_start_to_end(
    tmp_path: Path, ahead: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock_probes, "EVERY_S", 1000.0)
    monkeypatch.setattr(clock_probes, "STOP_S", 60.0)
    for host in ("a", "b"):
        (tmp_path / f"node-{host}").mkdir()
    first = ClockKeeper(tmp_path / "node-a", host="a", responder=None, address=None)
    second = ClockKeeper(tmp_path / "node-b", host="b", responder=None, address=ahead)
    deadline_ns = monotonic_ns() + 60_000_000_000
    while (tmp_path / "node-b" / paths.CLOCK).read_bytes().count(b"\n") < 2:
        assert monotonic_ns() < deadline_ns
    second.stop()
    first.stop()
    lines = (tmp_path / "node-b" / paths.CLOCK).read_text().splitlines()
    assert len(lines) == 3, "whose it is, one at the start, one at the end"
    # Both hosts of this test are this machine, which the reader knows by the boot id; another one would not be exact.
    text = (tmp_path / "node-b" / paths.CLOCK).read_text()
    own = lines[0].partition('"boot_id":"')[2].partition('"')[0]
    (tmp_path / "node-b" / paths.CLOCK).write_text(text.replace(own, "another"))
    clock = host_clocks(tmp_path)["b"]
    at = clock.points[0].t_ns
    assert abs(clock.offset_at(at) - AHEAD_NS) <= clock.error_at(at)


def test_address_travels_in_the_run(tmp_path: Path) -> None:
    assert clock_probes.read_address(tmp_path) is None
    responder = clock_probes.serve(tmp_path)
    assert responder is not None
    try:
        address = clock_probes.read_address(tmp_path)
        assert address is not None
        found = measure(address)
    finally:
        responder.close()
    assert found is not None
    assert abs(found.offset_ns) <= found.error_ns, "the same clock"
    (tmp_path / paths.CLOCK_ADDRESS).write_text("{}")
    assert clock_probes.read_address(tmp_path) is None
