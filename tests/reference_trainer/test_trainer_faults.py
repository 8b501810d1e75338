import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reference_trainer.errors import UsageError
from reference_trainer.faults import (
    FAULTS,
    ExitRank,
    Fault,
    KillRank,
    RaiseException,
    SkipCollective,
    SlowRank,
    describe_faults,
    parse_fault,
)

REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slow-rank:rank=2,ms=80", SlowRank(rank=2, ms=80)),
        ("slow-rank", SlowRank(rank=3, ms=100)),
        ("skip-collective:step=9,rank=0", SkipCollective(rank=0, step=9)),
        ("exception:", RaiseException(rank=3, step=5)),
        ("kill:rank=1", KillRank(rank=1, step=5)),
        ("exit:step=20", ExitRank(rank=3, step=20)),
    ],
)
def test_fault_is_read_with_its_keys(text: str, fault: Fault) -> None:
    assert parse_fault(text, world_size=4, steps=20) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slow", "unknown fault 'slow'; the faults are slow-rank, skip-collective, exception, kill, exit"),
        ("kill:ms=3", "unknown key 'ms'; the keys of kill are rank, step"),
        ("kill:rank", "rank is ''; give a whole number"),
        ("kill:rank=-1", "rank is '-1'; give a whole number"),
        ("kill:rank=4", "rank is 4; this job has ranks 0 to 3"),
        ("kill:step=0", "step is 0; with --steps 20 give step=1 to step=20"),
        ("kill:step=21", "step is 21; with --steps 20 give step=1 to step=20"),
        ("skip-collective:step=20", "step is 20; with --steps 20 give step=1 to step=19"),
    ],
)
def test_refusal_lists_what_is_valid(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_fault(text, world_size=4, steps=20)


def test_one_rank_has_no_collective_to_skip() -> None:
    with pytest.raises(UsageError, match="one rank has no collective to skip"):
        parse_fault("skip-collective", world_size=1, steps=20)


def test_fault_happens_at_its_step_and_at_no_other() -> None:
    fault = RaiseException(rank=0, step=3)
    fault.before_step(2)
    fault.before_step(4)
    with pytest.raises(RuntimeError, match="injected by --fault exception on rank 0 at step 3"):
        fault.before_step(3)
    assert [step for step in range(6) if SkipCollective(rank=0, step=3).skips_loss_average(step)] == [3]
    assert not Fault(rank=0).skips_loss_average(3)


def test_slow_rank_sleeps_before_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    for step in (1, 2):
        SlowRank(rank=0, ms=250).before_step(step)
    assert slept == [0.25, 0.25]


def test_exit_leaves_with_status_zero_after_the_handlers_of_atexit() -> None:
    program = (
        "import atexit; from reference_trainer.faults import ExitRank; atexit.register(print, 'left');"
        "ExitRank(rank=0, step=1).before_step(1); raise RuntimeError"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "left\n", "")


def test_every_fault_is_described_with_the_finding_it_must_lead_to() -> None:
    text = describe_faults()
    assert len(text.splitlines()) == len(FAULTS)
    assert all(f"(dtprof: {fault.finding})" in text for fault in FAULTS.values())
