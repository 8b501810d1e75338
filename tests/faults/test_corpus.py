"""The corpus: kind, culprits and line of every faulty program, and nothing on the sound ones.

All of them by `python -m tests.faults`; here those that together reach every rule on real records. Verdicts on stored
runs are in `tests/golden`.
"""

import json
import os
import subprocess
import sys

import pytest

from dtprof.diagnosis.rules import KINDS
from tests.faults import programs
from tests.faults.corpus import PROGRAMS
from tests.jobs import REPOSITORY

pytestmark = pytest.mark.jobs

ONE_OF_EACH_FAMILY = (
    "skip_of_a_group_of_its_own",
    "maximum_for_sum",
    "splits_that_do_not_fit",
    "ring_that_receives_first",
    "a_message_nobody_sends",
    "two_groups_in_opposite_order",
    "the_wrong_handle_at_one_step",
    "a_group_that_one_rank_does_not_make",
    "a_handle_that_one_rank_drops",
    "fewer_batches",
    "stopped",
    "one_that_fails_before_it_joins",
    "a_kill_that_the_others_wrap",
    "lines_that_differ_by_rank",
    "from_any_source",
    "pairs_and_quartets",
    "handles_asked_until_they_are_done",
)
"""One program of each family of findings, and some that are sound."""
OTHERS_OF_A_FAMILY = (
    "skip_made_good_at_the_end",
    "one_number_more",
    "other_tags",
    "a_smaller_buffer",
    "a_larger_buffer",
    "opposite_order_that_went_well",
    "splits_that_fit",
    "objects_of_uneven_size",
    "refused_on_one_rank_and_caught",
    "reductions_to_one_rank",
    "ring_of_batched_messages",
    "a_rank_that_ends_early_with_nothing_left_to_do",
    "futures_instead_of_waits",
    "gradients_averaged_without_a_wait",
    "bad_batches_are_skipped",
    "a_group_made_by_its_members_only",
)
"""Programs whose rules are reached by one of the others, with another cause."""


@pytest.fixture(scope="module")
def mistakes(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Run all programs whose tests were chosen, a few at a time, forked from one process."""
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and "mistakes" in item.fixturenames
    ]
    result = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--json", *chosen],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert result.stdout, result.stderr
    found: dict[str, list[str]] = json.loads(result.stdout.splitlines()[-1])
    return found


@pytest.mark.timeout(850)
@pytest.mark.parametrize(
    "name",
    [*ONE_OF_EACH_FAMILY, *(pytest.param(name, marks=pytest.mark.thorough) for name in OTHERS_OF_A_FAMILY)],
)
def test_the_verdict_on_a_program_of_the_corpus_is_right(name: str, mistakes: dict[str, list[str]]) -> None:
    assert mistakes[name] == []


def test_every_kind_but_notes_has_a_faulty_program() -> None:
    programs.load()
    notes = {"unequal-timeouts", "shared-group", "collective-in-except"}
    assert {program.kind for program in PROGRAMS.values()} - {None} == set(KINDS) - notes
