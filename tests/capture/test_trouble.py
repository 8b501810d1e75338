"""Trouble for the recorder is told once and noted in the run; the job goes on, and ends as without dtprof."""

import sys
from collections import Counter

import numpy as np
import pytest

from dtprof.records import schema
from dtprof.records.reader import open_run
from dtprof.records.tables import RankTables
from tests import jobs

pytestmark = pytest.mark.jobs
PROGRAM = jobs.PROGRAMS / "trouble.py"
SCENARIOS = (
    "fake_tensors",
    "subclasses",
    "looked_at",
    "intercepted",
    "failing",
    "fake_training",
    "taken_descriptors",
    "signals",
    "surroundings",
    "broken_hooks",
    "broken_stderr",
)
NUM_GROUPS, NUM_SITES = {"native": 1_000, "python": 100}, 10_000


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> jobs.Job:
    """Run the program without dtprof."""
    return jobs.finished([sys.executable, str(PROGRAM), *SCENARIOS], tmp_path_factory.mktemp("bare"))


@pytest.fixture(scope="module", params=["native", pytest.param("python", marks=pytest.mark.thorough)])
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, bare: jobs.Job) -> jobs.Job:
    """Run it recorded, behind what takes long; what it prints and its exit status must be the same."""
    run = tmp_path_factory.mktemp(request.param) / "run"
    options = ["--no-native"] if request.param == "python" else []
    status = bare.process.returncode
    many = (f"many_groups:{NUM_GROUPS[request.param]}", "many_sites")
    job = jobs.recorded(run, [sys.executable, str(PROGRAM), *many, *SCENARIOS], *options, status=status)
    assert job.stdout == f"many_groups done\nmany_sites done\n{bare.stdout}"
    return job


@pytest.fixture(scope="module")
def tables(recorded: jobs.Job) -> RankTables:
    tables = open_run(recorded.stdout_path.parent / "run").load(0)
    assert (tables.problems, tables.truncated) == ((), False)
    return tables


def operations_of(tables: RankTables, function: str) -> list[tuple[str, int]]:
    """Return operator and elements of the operations that functions of this name called."""
    sites = [site for site, at in tables.sites.items() if at.function.rpartition(".")[2] == function]
    called = tables.operations[np.isin(tables.operations["site"], sites)]
    return [(tables.raw_ops[int(row["op"])], int(row["numel"])) for row in called]


def test_every_one_of_a_thousand_groups_has_an_id_and_its_members(tables: RankTables) -> None:
    used = [row for row in tables.operations if tables.sites[int(row["site"])].function == "many_groups"]
    groups = {int(row["group"]) for row in used}
    assert len(used) == len(groups) == NUM_GROUPS[tables.hook]
    assert {tables.groups[group].ranks for group in groups} == {(0,)}


def test_every_one_of_ten_thousand_lines_is_distinguished(tables: RankTables) -> None:
    counted = Counter(
        site.function for row in tables.operations if (site := tables.sites[int(row["site"])]).file.startswith("/gen")
    )
    assert counted == Counter({f"generated_{number}": 1 for number in range(NUM_SITES)})


def test_fake_tensors_are_no_communication(tables: RankTables, bare: jobs.Job) -> None:
    assert "fake tensors: 1099511627776 elements, grown by less than 100 MB: True" in bare.stdout  # and the recorded
    assert operations_of(tables, "fake_tensors") == []


def test_tensors_of_the_users_own_classes_are_recorded_once(tables: RankTables) -> None:
    assert operations_of(tables, "subclasses") == [("allreduce_", 3)]
    # The line that passes an unwrapped tensor on is the user's, too.
    assert operations_of(tables, "__torch_dispatch__") == [("allreduce_", 5), ("broadcast_", 7)]


def test_what_torch_offers_keeps_its_name_and_signature(bare: jobs.Job) -> None:
    assert bare.stdout.count(" True (") == 11  # pickled and looked at; the recorded job printed the same
    assert "one function under two names: True" in bare.stdout


def test_steps_and_forward_passes_that_raise_are_over(tables: RankTables) -> None:
    names = [tables.ops[row["op"]] for row in tables.spans]
    sites = [site.function if (site := tables.sites.get(int(row["site"]))) else "" for row in tables.spans]
    ends = Counter(
        (name, int(row["state"]))
        for row, name, site in zip(tables.spans, names, sites, strict=True)
        if site.rpartition(".")[2] in ("failing", "<lambda>") and name in ("optimizer", "forward")
    )
    assert ends["optimizer", schema.STATE["failed"]] == 20
    assert ends["optimizer", schema.STATE["done"]] == 1
    assert ends["forward", schema.STATE["failed"]] == 40
    assert {state for _, state in ends} == {schema.STATE["failed"], schema.STATE["done"]}


def test_files_of_the_program_that_take_a_descriptor_of_ours_stay_as_they_are(
    bare: jobs.Job, tables: RankTables
) -> None:
    assert "bytes in files of our own: [0, 0, 0, 0, 0, 0, 0, 0]" in bare.stdout  # and the recorded
    assert len(operations_of(tables, "taken_descriptors")) == 1


def test_exceptions_of_signal_handlers_come_out(bare: jobs.Job) -> None:
    assert "0 swallowed" in bare.stdout  # and the recorded job printed the same


def test_steps_after_the_surroundings_changed_are_recorded(tables: RankTables) -> None:
    assert len(operations_of(tables, "broken_hooks")) == 3
    assert len(operations_of(tables, "broken_stderr")) == 1


def test_broken_hooks_are_reported_once_and_noted(recorded: jobs.Job, tables: RankTables) -> None:
    told = [line.removeprefix("dtprof: ") for line in recorded.stderr.splitlines() if line.startswith("dtprof: ")]
    broken = [line for line in told if "planned inside a hook" in line]
    assert "the begin of a phase is not recorded in this process: LookupError: planned inside a hook" in broken
    assert (
        "the members of a process group is not recorded in this process: LookupError: planned inside a hook" in broken
    )
    assert sorted(broken) == sorted(set(broken))
    assert set(broken) <= set(tables.notes)


def test_error_behind_a_broken_stderr_is_still_noted(recorded: jobs.Job, tables: RankTables) -> None:
    text = "a phase that the program marks is not recorded in this process: LookupError: planned inside a hook"
    assert text in tables.notes
    assert text not in recorded.stderr
