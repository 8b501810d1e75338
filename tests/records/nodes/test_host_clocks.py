"""The map from one host's clock to another's: on the measurements exact, between them linear, beyond them less sure."""

import json
from pathlib import Path

import pytest

from dtprof.records.nodes.host_clocks import ClockPoint, HostClock, host_clocks

SECOND = 1_000_000_000


def clock(*points: tuple[int, float, float]) -> HostClock:
    return HostClock(
        host="b",
        boot_id="boot-b",
        reference="a",
        points=tuple(ClockPoint(t_ns=t, offset_ns=offset, error_ns=error) for t, offset, error in points),
    )


def test_offset_lies_on_the_line_between_measurements() -> None:
    # 10 s apart the offset grows by 100 us: 10 millionths. A quarter of the way, a quarter of the growth.
    drifting = clock((0, 5000.0, 200.0), (10 * SECOND, 105_000.0, 300.0))
    assert drifting.drift_ppm == pytest.approx(10.0)
    assert drifting.offset_at(0) == 5000.0
    assert drifting.offset_at(10 * SECOND) == 105_000.0
    assert drifting.offset_at(5 * SECOND // 2) == pytest.approx(30_000.0)
    # The greater of both errors, and 1 ns for each 1 ms to the nearer measurement.
    assert drifting.error_at(5 * SECOND // 2) == pytest.approx(300.0 + 2500.0)


def test_beyond_the_measurements_the_drift_goes_on_and_the_error_grows() -> None:
    drifting = clock((0, 5000.0, 200.0), (10 * SECOND, 105_000.0, 300.0))
    assert drifting.offset_at(11 * SECOND) == pytest.approx(115_000.0)
    # In 1 s the rate may wander by 10 millionths, and the drift is off by both errors over 10 s: 50 ns a second.
    assert drifting.error_at(11 * SECOND) == pytest.approx(300.0 + 10_000.0 + 50.0)
    assert drifting.offset_at(-SECOND) == pytest.approx(-5000.0)
    assert drifting.error_at(-SECOND) == pytest.approx(200.0 + 10_000.0 + 50.0)


def test_one_measurement_knows_no_drift() -> None:
    once = clock((SECOND, 7.0, 2.0))
    assert (once.drift_ppm, once.offset_at(0), once.offset_at(2 * SECOND)) == (0.0, 7.0, 7.0)
    # The clocks may run apart by 500 millionths, and the rate wander by 10.
    assert once.error_at(2 * SECOND) == pytest.approx(2.0 + 510_000.0)


def test_kinks_are_followed() -> None:
    bent = clock((0, 0.0, 1.0), (10, 10.0, 1.0), (20, 0.0, 1.0))
    assert [bent.offset_at(t) for t in (5, 10, 15, 20)] == [5.0, 10.0, 5.0, 0.0]


def write(run: Path, host: str, *rows: object, boot_id: str = "", is_reference: bool = False) -> None:
    folder = run / f"node-{host}"
    folder.mkdir(parents=True)
    owner = {"host": host, "boot_id": boot_id or f"boot-{host}", "is_reference": is_reference}
    lines = [row if isinstance(row, str) else json.dumps(row) for row in (owner, *rows)]
    (folder / "clock.jsonl").write_text("\n".join(lines) + "\n")


def point(t_ns: int, offset_ns: float, error_ns: float = 1.0) -> dict[str, float]:
    return {"t_ns": t_ns, "offset_ns": offset_ns, "error_ns": error_ns, "round_trip_ns": 2, "rounds": 16}


def test_clocks_of_a_run_are_read_by_host(tmp_path: Path) -> None:
    write(tmp_path, "a", is_reference=True)
    write(tmp_path, "b", point(20, 9.0), point(10, 5.0), "rubbish", {"t_ns": "x"}, point(20, 8.0, 0.5))
    write(tmp_path, "same-machine", point(3, 1.0, 5.0), boot_id="boot-a")
    write(tmp_path, "unmeasured")
    clocks = host_clocks(tmp_path)
    assert set(clocks) == {"a", "b", "same-machine"}, "a clock without a measurement is not known"
    assert [(p.t_ns, p.offset_ns) for p in clocks["b"].points] == [(10, 5.0), (20, 8.0)]
    assert clocks["b"].reference == "a"
    for exact in ("a", "same-machine"):
        assert (clocks[exact].offset_at(123), clocks[exact].error_at(123), clocks[exact].drift_ppm) == (0.0, 0.0, 0.0)


def test_without_a_reference_nothing_is_known(tmp_path: Path) -> None:
    write(tmp_path, "b", point(1, 1.0))
    assert host_clocks(tmp_path) == {}
