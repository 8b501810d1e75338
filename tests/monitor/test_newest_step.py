"""The newest step that every rank has ended: the parts that a summary of that step alone would give."""

from pathlib import Path

from dtprof.analysis.results import PARTS
from dtprof.monitor.live_run import LiveWindow
from dtprof.monitor.newest_step import STEPS_READ, measure_newest_step
from tests import builders
from tests.builders import RankBuilder
from tests.monitor.test_live_run import MS, STEP, two_ranks


def watch(run: Path) -> LiveWindow:
    """Return what is there at a first look."""
    live = LiveWindow(run)
    live.poll()
    return live


def test_parts_are_those_of_the_newest_step_and_sum_to_it(tmp_path: Path) -> None:
    live = watch(builders.write_run(tmp_path / "run", two_ranks(40)))
    found = measure_newest_step(live.frozen(num_steps=STEPS_READ))
    assert found is not None
    # From the end of one optimizer step (95 ms) to that of the next. Rank 0 computes for 20 + 60 ms and meets rank 1 at
    # 80 ms; rank 1 computes for 20 + 40 ms and waits from 60 ms. Both take 5 ms to transfer and 5 to optimise; 10 rest.
    assert (found.number, dict(found.duration_ns)) == (40, {0: STEP, 1: STEP})
    nothing = dict.fromkeys(PARTS, 0)
    same = {"exposed_transfer": 5 * MS, "optimizer": 5 * MS, "host": 10 * MS}
    assert found.parts_ns[0] == nothing | same | {"compute": 80 * MS}
    assert found.parts_ns[1] == nothing | same | {"compute": 60 * MS, "exposed_wait": 20 * MS}


def test_step_is_one_that_the_slowest_rank_has_ended(tmp_path: Path) -> None:
    live = watch(builders.write_run(tmp_path / "run", [two_ranks(12)[0], two_ranks(10)[1]]))
    found = measure_newest_step(live.frozen(num_steps=STEPS_READ))
    assert found is not None
    assert found.number == 10


def test_step_that_the_program_marks_has_the_number_that_it_has_in_the_run(tmp_path: Path) -> None:
    ranks = two_ranks(40)
    for rank in ranks:
        for number in range(1, 41):  # the optimizer ended a step before the first mark
            rank.span("step", number * STEP - MS, number * STEP - MS, step=number, microbatch=number)
    live = watch(builders.write_run(tmp_path / "run", ranks))
    found = measure_newest_step(live.frozen(num_steps=STEPS_READ))
    assert found is not None
    assert found.number == 40


def test_ranks_without_steps_have_no_newest_one(tmp_path: Path) -> None:
    ranks = [RankBuilder(number, 2) for number in range(2)]
    for rank in ranks:
        rank.op("all_reduce", MS, 2 * MS)
    assert measure_newest_step(watch(builders.write_run(tmp_path / "run", ranks))) is None


def test_rank_whose_operations_are_not_seen_to_end_has_a_step_time_and_no_parts(tmp_path: Path) -> None:
    ranks = two_ranks(10)
    ranks[1].op("all_reduce", 9 * STEP + 86 * MS, 9 * STEP + 87 * MS, flags=0)
    found = measure_newest_step(watch(builders.write_run(tmp_path / "run", ranks)))
    assert found is not None
    assert dict(found.duration_ns) == {0: STEP, 1: STEP}
    assert set(found.parts_ns) == {0}
