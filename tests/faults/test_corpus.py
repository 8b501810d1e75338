"""The corpus: kind, culprits and line of every faulty program, and nothing on the sound ones.

All of them by `python -m tests.faults`; here those that together reach every rule on real records, and those of the
simulated accelerator, whose verdicts `python -m tests.faults --on both` compares. Verdicts on stored runs are in
`tests/golden`.
"""

import json
import os
import subprocess
import sys

import pytest

from dtprof.diagnosis.rules import KINDS
from tests.accelerator.compiled_device import ensure_library
from tests.faults import device_programs, programs
from tests.faults.corpus import PROGRAMS, SOUND, list_programs
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
    "a_null_pointer_that_native_code_reads",
    "one_that_fails_before_it_joins",
    "a_kill_that_the_others_wrap",
    "lines_that_differ_by_rank",
    "from_any_source",
    "pairs_and_quartets",
    "handles_asked_until_they_are_done",
    "a_step_taken_before_the_waits",
    "waits_in_other_ways",
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
    "a_buffer_scaled_before_its_wait",
    "a_message_read_before_its_wait",
    "parts_of_one_buffer",
    "gradients_of_wrapped_models",
    "bad_batches_are_skipped",
    "a_group_made_by_its_members_only",
    "one_step_in_which_rank_0_begins_at_the_other_edge",
    "killed_by_raise_signal",
    "ended_by_a_term_signal_while_it_computes",
    "metrics_that_a_failing_rank_adds_to_a_gradient",
    "a_rank_with_less_patience",
    "a_rank_that_finds_no_checkpoint_and_begins_anew",
    "layers_registered_in_another_order",
    "layers_sharded_in_another_order",
    "the_pair_of_others",
    "a_term_signal_with_a_handler",
    "stages_of_which_one_is_new",
    "a_call_of_all_on_a_group_of_some",
)
"""Programs whose rules are reached by one of the others, with another cause."""
CHEAP_ON_DEVICE = (
    "ring_that_receives_first",
    "two_groups_in_opposite_order",
    "fewer_batches",
)
"""Programs on whose hosts all calls return, on a device: what is known of them, devices tell."""


@pytest.fixture(scope="module")
def mistakes(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Run all programs whose tests were chosen, a few at a time, forked from one process."""
    return run_chosen(request, "mistakes")


@pytest.fixture(scope="module")
def mistakes_on_device(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """Run the chosen programs on the simulated accelerator."""
    ensure_library()
    return run_chosen(request, "mistakes_on_device", "--on", "sim")


def run_chosen(request: pytest.FixtureRequest, fixture: str, *options: str) -> dict[str, list[str]]:
    """Return the mistakes in the verdicts on all programs whose tests were chosen and use a fixture."""
    chosen = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and fixture in item.fixturenames
    ]
    result = subprocess.run(
        [sys.executable, "-m", "tests.faults", "--json", *options, *chosen],
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


@pytest.mark.timeout(850)
@pytest.mark.parametrize(
    "name",
    [
        *CHEAP_ON_DEVICE,
        *(
            pytest.param(name, marks=pytest.mark.thorough)
            for name in (*device_programs.FAULTY, *device_programs.SOUND)
            if name not in CHEAP_ON_DEVICE
        ),
    ],
)
def test_the_verdict_on_a_device_is_that_of_gloo(name: str, mistakes_on_device: dict[str, list[str]]) -> None:
    assert mistakes_on_device[name] == []


def test_programs_of_the_device_cover_every_kind_that_the_device_can_have() -> None:
    programs.load()
    limits = {"unequal-timeouts"}  # of gloo: the simulated back end waits for ever
    covered = {PROGRAMS[name].kind for name in device_programs.FAULTY}
    assert {program.kind for program in PROGRAMS.values()} - covered == {None} | limits
    assert {PROGRAMS[name].kind for name in device_programs.SOUND} == {None}


def test_every_kind_but_notes_has_a_faulty_program() -> None:
    programs.load()
    notes = {"shared-group", "collective-in-except", "memory-growth"}
    several_hosts = {"host-silent", "slow-link", "version-mismatch"}  # tests/hosts
    assert {program.kind for program in PROGRAMS.values()} - {None} == set(KINDS) - notes - several_hosts


def test_every_program_is_listed_once_with_its_file_under_its_kind() -> None:
    programs.load()
    listed = [line.split()[-1] for kind in (*KINDS, SOUND) for line in list_programs(kind)]
    assert sorted(listed) == sorted(PROGRAMS)
    assert [line for line in list_programs("rank-killed") if line.endswith(" killed")] == ["ends.py:26 killed"]
