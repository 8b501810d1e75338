from pathlib import Path

import pytest

from dtprof.diagnosis.findings import Finding
from dtprof.records.tables import ProcessExit
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import START_NS, RankBuilder, write_run


def attempts(folder: Path, ends: list[tuple[int, int, int]], *, num_hosts: int = 4) -> Finding:
    """Write a job of 8 ranks on hosts by turns, each attempt killed as told: (rank, step, line); return the finding."""
    ranks, exits = [], []
    for number, (culprit, step, line) in enumerate(ends):
        for rank in range(8):
            builder = RankBuilder(rank, world_size=8, attempt=number, host=f"host-{rank % num_hosts}", closed=False)
            builder.pid = 1000 * (number + 1) + rank
            for i in range(step):
                builder.op("all_reduce", 10 * i, 10 * i + 5, step=i, site=builder.site("all_reduce", line=7))
            if rank == culprit:
                builder.span("leaving", 10 * step, 10 * step + 1, step=step, site=builder.site("", line=line))
            else:
                builder.op("all_reduce", 10 * step, step=step, site=builder.site("all_reduce", line=7))
            ranks.append(builder)
            status, t = (-9, 10 * step + 2) if rank == culprit else (-15, 10 * step + 50)
            exits.append(ProcessExit(pid=builder.pid, status=status, t_ns=START_NS + t))
    (finding,) = diagnose_run(write_run(folder, ranks, exit_status=1, exits=exits)).findings
    assert (finding.kind, finding.culprit_ranks) == ("rank-killed", (ends[-1][0],))
    return finding


def test_the_same_place_in_every_attempt_is_a_fault_of_the_program(tmp_path: Path) -> None:
    finding = attempts(tmp_path / "run", [(2, 5, 40), (2, 5, 40)])
    assert finding.evidence[0].startswith("the same in both attempts: rank-killed at the same place at ")
    assert "/home/me/train.py:40" in finding.evidence[0]
    assert "a restart ends there again" in finding.advice[0]


def test_one_host_in_every_attempt_is_named_where_chance_does_not_explain_it(tmp_path: Path) -> None:
    finding = attempts(tmp_path / "run", [(1, 3, 40), (5, 6, 41), (1, 4, 40)])
    assert finding.evidence[0] == (
        "in all 3 attempts the culprit ran on host host-1, each time at another place; before: Rank 1, rank-killed; "
        "Rank 5, rank-killed"
    )
    assert "Look at host host-1" in finding.advice[0]


@pytest.mark.parametrize(
    ("ends", "num_hosts"),
    [
        ([(1, 3, 40), (2, 6, 41)], 4),  # two hosts
        ([(1, 3, 40), (3, 6, 41)], 2),  # one of two hosts twice: as probable as not
        ([(1, 3, 40), (1, 6, 40)], 1),  # there is but one
    ],
)
def test_attempts_that_have_nothing_in_common_add_nothing(
    tmp_path: Path, ends: list[tuple[int, int, int]], num_hosts: int
) -> None:
    finding = attempts(tmp_path / "run", ends, num_hosts=num_hosts)
    assert "attempt" not in " ".join((*finding.evidence, *finding.advice))
