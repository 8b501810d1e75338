"""Live views call an operation open that is issued and not completed on its device."""

from pathlib import Path

import pytest

from dtprof.monitor.device_operations import OpenDeviceOperations
from dtprof.monitor.prometheus.node_tally import NodeTally
from dtprof.monitor.rank_activity import RankActivities
from dtprof.records import events
from dtprof.records.run_follower import RunFollower
from dtprof.records.schema import DEVICE_FLAG, FLAG
from tests.builders import RankBuilder, write_run
from tests.monitor.growing import grow

FOLLOWED = FLAG["device"] | FLAG["followed"] | FLAG["no_work"]
STEPS, IN_STEP = 6, 3
HUNG_AT = 14  # the collective of 18 that the device has begun and does not end


def hanging_rank(rank: int) -> RankBuilder:
    """Return a rank whose host has issued six steps of three collectives, and whose device is in the fifteenth."""
    built = RankBuilder(rank, 2, closed=False)
    for seq in range(STEPS * IN_STEP):
        t = 1000 * seq
        built.op("all_reduce", t, returned=t + 5, site=built.site("all_reduce", line=42), flags=FOLLOWED, nbytes=64)
        if seq <= HUNG_AT:
            end = t + 300 if seq < HUNG_AT else None
            built.device_interval("operation", "all_reduce", t + 100, end, host=(t, 0), seq=seq)
        if seq % IN_STEP == IN_STEP - 1:
            built.span(events.OPTIMIZER, t + 500, t + 510)
    return built


@pytest.mark.parametrize("polls", [1, 7])
def test_what_the_device_has_not_completed_is_open_however_the_records_came(tmp_path: Path, polls: int) -> None:
    run = write_run(tmp_path / "run", [hanging_rank(0)])
    follower, followed = RunFollower(run), OpenDeviceOperations()
    for _ in grow(run, polls):
        rows = followed.take(follower.poll()[0])
    assert rows["seq"].tolist() == [14, 15, 16, 17]
    assert followed.front(rows)["seq"].tolist() == [HUNG_AT]  # the only one that it has begun


def test_messages_complete_in_any_order_and_leave_those_between_open(tmp_path: Path) -> None:
    rank = RankBuilder(0, 3, closed=False)
    for seq, peer in enumerate((1, 2, 1)):
        rank.op("send", 1000 * seq, returned=1000 * seq + 5, peer=peer, flags=FOLLOWED)
        if seq != 1:
            ran = (1000 * seq + 100, 1000 * seq + 200)
            rank.device_interval("operation", "send", *ran, host=(1000 * seq, 0), seq=seq, flags=DEVICE_FLAG["p2p"])
    follower = RunFollower(write_run(tmp_path / "run", [rank]))
    assert OpenDeviceOperations().take(follower.poll()[0])["seq"].tolist() == [1]


def test_a_quiet_rank_is_shown_in_the_operation_that_its_device_has_begun(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", [hanging_rank(rank) for rank in range(2)])
    growths = RunFollower(run).poll()
    present = RankActivities().take(growths, exit_of=lambda *_: None, job_has_ended=False, boot_id="boot-a")
    assert [(rank.doing, rank.blocks, rank.where) for rank in present] == [
        ("all_reduce #14 of default_pg on its device", True, "train.py:42")
    ] * 2


def test_the_gauge_of_open_operations_counts_those_of_devices(tmp_path: Path) -> None:
    tally = NodeTally()
    tally.take(RunFollower(write_run(tmp_path / "run", [hanging_rank(rank) for rank in range(2)])).poll())
    assert tally.sums["open"].sum() == 2 * 4
    oldest = {own.oldest_open_ns for own in tally.ranks.values()}
    assert oldest == {int(hanging_rank(0).tables().operations["issued_ns"][HUNG_AT])}
