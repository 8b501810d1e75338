"""How a rank ended, in words."""

from pathlib import Path

import pytest

from dtprof.analysis.rank_exits import EndState, find_end
from dtprof.records.tables import UNKNOWN_NS, ProcessExit


@pytest.mark.parametrize(
    ("status", "ended_ns", "has_exception", "job_has_ended", "expected"),
    [
        (0, 5, False, True, "finished"),
        (1, 5, True, True, "exited 1"),
        (-9, UNKNOWN_NS, False, True, "killed by SIGKILL"),
        (-200, UNKNOWN_NS, False, True, "killed by signal 200"),
        (None, 5, False, None, "finished"),
        (None, 5, True, None, "exited 1"),
        (None, UNKNOWN_NS, False, False, "running"),
        (None, UNKNOWN_NS, False, True, "unknown"),
        (None, UNKNOWN_NS, False, None, "unknown"),
    ],
)
def test_the_parent_is_believed_before_the_rank_itself(
    status: int | None, ended_ns: int, has_exception: bool, job_has_ended: bool | None, expected: str
) -> None:
    seen = None if status is None else ProcessExit(pid=1, status=status, t_ns=9)
    end = find_end(exit_seen=seen, ended_ns=ended_ns, has_exception=has_exception, job_has_ended=job_has_ended)
    assert str(end) == expected
    assert end.failed == expected.startswith(("exited", "killed"))


def test_the_page_of_the_json_lists_every_state() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reference" / "summary-json.md").read_text(encoding="utf-8")
    (row,) = [line for line in page.splitlines() if line.startswith("| `ended` |")]
    assert [state for state in EndState if f"`{state.example}`" not in row] == []
