"""A sample of generated faulty programs and their sound twins; all of them: `python -m tests.faults.generated`."""

import pytest

from tests.faults.generated.machine import Do, Machine, Plan
from tests.faults.generated.mutations import MUTATIONS
from tests.faults.generated.scores import BANDS, Case, calibration, generate


@pytest.fixture(scope="module")
def sample() -> list[Case]:
    """Return four programs of each class, always the same."""
    return list(generate(4 * len(MUTATIONS), seed=7))


def test_no_sound_program_gives_a_warning(sample: list[Case]) -> None:
    assert [(case.template, case.seed, case.verdict.findings) for case in sample if not case.truth and case.first] == []


def test_most_faults_are_named_with_their_ranks_and_line(sample: list[Case]) -> None:
    faulty = [case for case in sample if case.truth is not None]
    wrong = [f"{case.fault} {case.seed}" for case in faulty if not (case.kind_right and case.culprits_right)]
    assert len(wrong) <= 0.2 * len(faulty), wrong
    assert sum(case.line_right for case in faulty) >= 0.9 * len(faulty)


def test_columns_spare_the_comparison_of_single_operations_and_change_no_verdict(
    sample: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    looked = []

    def look_closely(*_: object) -> bool:
        looked.append(_)
        return False

    monkeypatch.setattr("dtprof.diagnosis.divergence.skipped_calls.issued_same_collectives", look_closely)
    again = list(generate(len(MUTATIONS), seed=7))
    assert [case.verdict for case in again] == [case.verdict for case in sample[: len(again)]]
    assert looked


def test_bands_hold_every_confidence(sample: list[Case]) -> None:
    found = [case for case in sample if case.first is not None]
    assert sum(count for _, _, count, _, _ in calibration(found)) == len(found)
    assert list(BANDS) == sorted(BANDS)


def run(*programs: list[Do]) -> Machine:
    """Let a job run of one group."""
    machine = Machine(Plan(len(programs), {"0": tuple(range(len(programs)))}, list(programs)), seed=1)
    machine.run()
    return machine


def test_the_machine_lets_calls_meet_by_position() -> None:
    first, second = Do("call", 1, "all_reduce"), Do("call", 2, "barrier")
    assert all(rank.finished for rank in run([first, second], [first, second]).ranks)
    assert not any(rank.gone for rank in run([first, second], [second, first]).ranks), "they hang in the first"


def test_the_machine_delivers_small_messages_at_once_and_large_ones_to_their_receiver() -> None:
    for nbytes, finished in ((8, True), (1 << 20, False)):
        programs = [
            [Do("send", 1, peer=1 - rank, nbytes=nbytes), Do("recv", 2, peer=1 - rank, nbytes=nbytes)]
            for rank in range(2)
        ]
        assert [rank.finished for rank in run(*programs).ranks] == [finished, finished]


def test_who_loses_a_peer_raises_after_it() -> None:
    machine = run([Do("kill", 1)], [Do("call", 2, "all_reduce")], [Do("call", 2, "all_reduce")])
    assert [rank.status for rank in machine.ranks] == [-9, 1, 1]
    assert machine.ranks[0].ended < min(rank.ended for rank in machine.ranks[1:])
