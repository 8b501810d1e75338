"""A clock that jumps and a device that vanishes cost times, and never give wrong ones."""

import re
from pathlib import Path

import numpy as np
import pytest

from dtprof.records import codes
from dtprof.records.reader import open_run
from dtprof.records.tables import UNKNOWN_NS
from tests import jobs
from tests.accelerator.compiled_device import ensure_library

pytestmark = pytest.mark.jobs

MS = 1_000_000


def test_times_before_and_after_a_jump_of_the_clock_are_right_and_the_rest_is_not_known(tmp_path: Path) -> None:
    ensure_library()
    ended = tmp_path / "ended"
    program = jobs.forked(1, jobs.PROGRAMS / "device_lost.py", str(ended))
    jobs.recorded(tmp_path / "run", program, env={"PYTHONPATH": str(jobs.REPOSITORY)})
    tables = open_run(tmp_path / "run").load(0)
    assert (tables.errors, tables.problems) == (0, ())
    jumped, lost = tables.notes
    said = re.fullmatch(
        r"the clock of sim:0 jumped by about \+(\d\.\d{3}) s against that of its host; times on the device of "
        "the second before are not known",
        jumped,
    )
    assert said is not None, jumped
    assert float(said[1]) == pytest.approx(5, abs=0.2)
    assert lost.startswith("times on the device are not recorded any more: ")
    assert "Xid 79" in lost
    rows = tables.device_intervals[tables.device_intervals["kind"] == codes.DEVICE_PHASE]
    rows = rows[(rows["end_ns"] != UNKNOWN_NS) & np.isin(rows["op"], [tables.ops.index("phase:of 3 ms")])]
    # The stream is empty when a phase begins: a phase is longer by what the host takes to launch.
    assert (rows["end_ns"] - rows["begin_ns"] >= 3 * MS - 2).all()
    assert (rows["end_ns"] - rows["begin_ns"] < 1000 * MS).all()
    assert (rows["begin_ns"] >= rows["host_begin_ns"] - rows["error_ns"]).all()
    assert (rows["end_ns"] <= int(ended.read_text())).all()
    number = np.count_nonzero(tables.spans["op"] == tables.ops.index("phase:of 3 ms"))
    assert 20 <= len(rows) < number
    # One after the other, as far as the error of each on the clock of the host lets that be seen.
    errors = rows["error_ns"].astype(np.int64)
    assert (np.diff(rows["begin_ns"]) + errors[1:] + errors[:-1] >= 3 * MS).all()
