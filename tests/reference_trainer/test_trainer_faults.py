import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from torch import distributed, nn

from reference_trainer.batches import Batches
from reference_trainer.errors import UsageError
from reference_trainer.faults import FAULTS, Fault, Scene, describe_faults, parse_fault
from reference_trainer.faults.collectives import SkipCollective, WrongReduceOp
from reference_trainer.faults.exits import EarlyBreak, ExitRank, KillRank, RaiseException, UnevenData
from reference_trainer.faults.model_parts import MissingMicrobatch
from reference_trainer.faults.slowness import GrowingSlowRank, RandomSlowRank, SlowBackward, SlowLink, SlowRank
from reference_trainer.faults.waits import LoaderHang, LongCheckpoint, MemoryLeak
from reference_trainer.options import parse_options
from reference_trainer.placement import Placement
from tests.reference_trainer.test_trainer_batches import TOKENS

REPOSITORY = Path(__file__).parents[2]


def build_scene(*, rank: int = 0, pipeline: Any = None) -> Scene:
    options = parse_options(["--batch-size", "2", "--sequence-length", "9"], Placement())
    part: Any = SimpleNamespace(module=nn.Linear(2, 2))
    batches = Batches(TOKENS, options, data_rank=0)
    return Scene(rank=rank, parts=[part], pipeline=pipeline, batches=batches, loss_group=None)


def attach(fault: Fault, **settings: Any) -> Scene:
    scene = build_scene(**settings)
    fault.attach(scene)
    return scene


@pytest.fixture
def slept_s(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    return slept


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("slow-rank:rank=2,ms=80", SlowRank(rank=2, ms=80)),
        ("slow-rank", SlowRank(rank=3, ms=100)),
        ("slow-link", SlowLink(rank=0, ms=20)),
        ("long-checkpoint:seconds=3", LongCheckpoint(rank=0, step=5, seconds=3)),
        ("skip-collective:step=9,rank=0", SkipCollective(rank=0, step=9)),
        ("exception:", RaiseException(rank=3, step=5)),
        ("kill:rank=1", KillRank(rank=1, step=5)),
        ("exit:step=20", ExitRank(rank=3, step=20)),
    ],
)
def test_fault_is_read_with_its_keys(text: str, fault: Fault) -> None:
    assert parse_fault(text, world_size=4, pipeline_ranks=2, steps=20) == fault


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("slow", f"unknown fault 'slow'; the faults are {', '.join(FAULTS)}"),
        ("kill:ms=3", "unknown key 'ms'; the keys of kill are rank, step"),
        ("kill:rank", "rank is ''; give a whole number"),
        ("kill:rank=-1", "rank is '-1'; give a whole number"),
        ("kill:rank=4", "rank is 4; this job has ranks 0 to 3"),
        ("kill:step=0", "step is 0; with --steps 20 give step=1 to step=20"),
        ("kill:step=21", "step is 21; with --steps 20 give step=1 to step=20"),
        ("slow-rank:ms=1000000000", "ms is 1000000000; give a number of at most 9 digits"),
        ("slow-rank:ms=0", "ms is 0, which is no fault; give a number from 1 on"),
        ("small-collectives:count=0", "count is 0, which is no fault"),
        ("skip-collective:step=20", "step is 20; with --steps 20 give step=1 to step=19"),
        ("slow-stage", "only a pipeline has stages; give --pp 2 or more too"),
    ],
)
def test_refusal_lists_what_is_valid(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse_fault(text, world_size=4, pipeline_ranks=1, steps=20)


@pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.min_ranks > 1])
def test_one_rank_has_no_other_to_wait_for(name: str) -> None:
    with pytest.raises(UsageError, match="one rank waits for no other"):
        parse_fault(name, world_size=1, pipeline_ranks=1, steps=20)


def test_a_restarted_job_has_no_fault() -> None:
    assert parse_options(["--fault", "kill"], Placement()).fault == KillRank(rank=0)
    assert parse_options(["--fault", "kill"], Placement(attempt=1)).fault is None


def test_fault_happens_at_its_step_on_its_rank_and_at_no_other() -> None:
    fault = RaiseException(rank=0, step=3)
    attach(fault, rank=1)
    fault.before_step(3)
    attach(fault, rank=0)
    fault.before_step(2)
    fault.before_step(4)
    with pytest.raises(RuntimeError, match="injected by --fault exception on rank 0 at step 3"):
        fault.before_step(3)


@pytest.mark.parametrize(
    ("fault", "expected_s"),
    [
        (SlowRank(rank=0, ms=250), [0.25, 0.25, 0.25]),
        (GrowingSlowRank(rank=0, ms=10), [0.01, 0.02, 0.03]),
        (SlowRank(rank=1, ms=250), []),
    ],
)
def test_slow_rank_sleeps_before_every_step(fault: Fault, expected_s: list[float], slept_s: list[float]) -> None:
    attach(fault)
    for step in (1, 2, 3):
        fault.before_step(step)
    assert slept_s == pytest.approx(expected_s)


def test_random_sleeps_are_on_average_what_was_asked_for(slept_s: list[float]) -> None:
    fault = RandomSlowRank(rank=0, ms=100)
    attach(fault)
    for step in range(1, 1001):
        fault.before_step(step)
    assert min(slept_s) < 0.01 < 0.19 < max(slept_s)
    assert sum(slept_s) / 1000 == pytest.approx(0.1, abs=0.01)


def test_slow_backward_sleeps_in_the_backward_pass_alone(slept_s: list[float]) -> None:
    fault = SlowBackward(rank=0, ms=100)
    scene = attach(fault)
    output = scene.parts[0].module(torch.ones(2))
    assert slept_s == []
    output.sum().backward()
    assert slept_s == [0.1]


def test_slow_link_holds_back_as_long_as_there_are_sends(slept_s: list[float]) -> None:
    stage = SimpleNamespace(get_fwd_send_ops=lambda _: ["a", "b"], get_bwd_send_ops=lambda _: [])
    attach(SlowLink(rank=0, ms=20), pipeline=SimpleNamespace(schedule=SimpleNamespace(_stage=stage)))
    assert stage.get_fwd_send_ops(0) == ["a", "b"]
    assert stage.get_bwd_send_ops(0) == []
    assert slept_s == [0.04, 0]


def test_exit_leaves_with_status_zero_after_the_handlers_of_atexit() -> None:
    program = (
        "import atexit; from reference_trainer.faults.exits import ExitRank; atexit.register(print, 'left');"
        "ExitRank(rank=0, step=1).strike(); raise RuntimeError"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "left\n", "")


def test_stopped_rank_goes_on_when_asked_to() -> None:
    program = "from reference_trainer.faults.exits import StopRank; StopRank(rank=0).strike(); print('on')"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=60)[0] == "on\n"
    finally:
        process.kill()


def test_memory_runs_out_in_an_exception() -> None:
    program = (
        "from types import SimpleNamespace as N; from torch import nn; from reference_trainer.faults.exits import *;"
        "f = OutOfMemory(rank=0, mb=8); f.scene = N(parts=[N(module=nn.Linear(1, 1))]); f.strike()"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "RuntimeError" in result.stderr
    assert "can't allocate memory" in result.stderr


def test_uneven_data_ends_in_the_loader_and_early_break_before_it() -> None:
    uneven, early = UnevenData(rank=0, step=3), EarlyBreak(rank=0, step=2)
    batches = attach(uneven).batches
    assert len(list(batches)) == 2
    batches = attach(early).batches
    next(batches)
    early.after_step(1)
    next(batches)
    early.after_step(2)
    assert list(batches) == []
    assert batches.loader is not None
    assert next(batches.loader)  # there is more


def test_loader_gives_some_steps_before_it_hangs() -> None:
    scene = attach(LoaderHang(rank=0, step=3))
    assert [next(scene.batches)["targets"].shape[0] for _ in range(2)] == [2, 2]
    hanging: Any = scene.batches.rows
    assert hanging.num_left == 0


def test_memory_that_leaks_is_resident() -> None:
    fault = MemoryLeak(rank=0, mb=40)  # above 32 MiB no memory that was let go before is used again (mallopt, glibc)
    attach(fault)
    growths = []
    for step in range(1, 6):
        before = psutil.Process().memory_info().rss
        fault.after_step(step)
        growths.append(psutil.Process().memory_info().rss - before)
    # The median: a kernel may take back pages of the process meanwhile. Memory let go would not grow a second time.
    assert statistics.median(growths) >= 39 * 2**20


def test_all_reduce_is_put_back_behind_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def record(_: torch.Tensor, **settings: Any) -> None:
        calls.append(settings)

    monkeypatch.setattr(distributed, "all_reduce", record)
    for fault in (WrongReduceOp(rank=0, step=2), SkipCollective(rank=0, step=2)):
        attach(fault)
        for step in (1, 2, 3):
            loss = fault.before_loss_average(step, torch.zeros(()))
            distributed.all_reduce(loss)
            fault.after_step(step)
    operations = [call.get("op") for call in calls]
    assert operations == [None, distributed.ReduceOp.MAX, None, None, None]


def test_last_microbatch_is_passed_by_in_every_kind_of_schedule() -> None:
    given: list[Any] = []
    single = SimpleNamespace(_n_microbatches=3)
    single._step_microbatches = lambda *lists, **_: given.append((single._n_microbatches, *lists))
    fault = MissingMicrobatch(rank=0, step=2)
    attach(fault, pipeline=SimpleNamespace(schedule=single))
    fault.before_step(1)
    single._step_microbatches([1, 2, 3], None)
    fault.before_step(2)
    single._step_microbatches([1, 2, 3], None)
    assert given == [(3, [1, 2, 3], None), (2, [1, 2], None)]
    assert single._n_microbatches == 3

    actions = [SimpleNamespace(microbatch_index=index) for index in (0, 1, 1, None)]
    several = SimpleNamespace(_n_microbatches=2, rank=1, pipeline_order_with_comms={0: actions, 1: actions})
    attach(fault, pipeline=SimpleNamespace(schedule=several))
    fault.before_step(2)
    assert [len(order) for order in several.pipeline_order_with_comms.values()] == [4, 2]


def test_every_fault_is_described_with_the_finding_it_must_lead_to() -> None:
    text = describe_faults()
    for name, fault in FAULTS.items():
        assert re.search(rf"^  {name} +rank", text, re.MULTILINE)
        assert (fault.finding is None) != (fault.figure is None)
        assert f"(dtprof: {fault.finding or fault.figure}" in text
        assert (fault.__doc__ or "").splitlines()[0].endswith(".")


def test_healthy_fault_does_nothing() -> None:
    fault = Fault(rank=0)
    scene = attach(fault)
    fault.before_step(1)
    loss = torch.ones(())
    assert fault.before_loss_average(1, loss) is loss
    fault.after_step(1)
    assert replace(scene) == scene
