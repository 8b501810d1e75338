"""What a rank spends its step on, measured against delays of known size that the program has at known places."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest

from dtprof.analysis.results import RankResult, Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records import events, schema
from dtprof.records.reader import open_run
from dtprof.records.tables import Array, RankTables
from tests import jobs

pytestmark = pytest.mark.jobs
DELAY_NS = 20_000_000
SLACK_NS = 15_000_000
"""How much longer than asked for the shortest of several sleeps, with the work around it, may take."""
MODEL_BYTES = 3 * (32 * 32 + 32) * 4
BLOCK_BYTES = MODEL_BYTES // 3


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A run of a job."""

    tables: tuple[RankTables, ...]
    summary: Summary

    @property
    def rank(self) -> RankResult:
        return self.summary.ranks[0]

    def spans(self, phase: str) -> Array:
        tables = self.tables[0]
        chosen: Array = tables.spans[np.isin(tables.spans["op"], [i for i, op in enumerate(tables.ops) if op == phase])]
        return chosen

    def window(self, phase: str) -> tuple[int, int, int]:
        """Return begin, end and number of the steps that figures are of; each ends with a span of `phase`."""
        assert self.summary.steps.used is not None
        first, last = self.summary.steps.used  # a slow machine can make more than the first one warm-up
        ends = np.sort(self.spans(phase)["end_ns"]).tolist()
        return ends[first - 2], ends[last - 1], last - first + 1

    def samples(self, name: str) -> list[int]:
        tables = self.tables[0]
        return [int(row["value"]) for row in tables.samples if tables.ops[row["op"]] == name]


def lengths(spans: Array) -> list[int]:
    return sorted((spans["end_ns"] - spans["begin_ns"]).tolist())


Record = Callable[..., Recorded]


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Record:
    """Run a program of these tests, once for equal arguments."""

    @cache
    def run(program: str, arguments: tuple[str, ...], ranks: int, native: bool) -> Recorded:
        folder = tmp_path_factory.mktemp("phases")
        path = jobs.PROGRAMS / program
        given = [argument.replace("FOLDER", str(folder)) for argument in arguments]
        command = [sys.executable, str(path), *given] if ranks == 1 else jobs.forked(ranks, path, *given)
        job = jobs.recorded(folder / "run", command, *([] if native else ["--no-native"]))
        assert "Exception ignored" not in job.stderr
        run = open_run(folder / "run")
        tables = tuple(run.load(rank) for rank in range(ranks))
        assert [(table.errors, table.notes) for table in tables] == [(0, ())] * ranks
        return Recorded(tables=tables, summary=summarise(run))

    def record(program: str, *arguments: str, ranks: int = 1, native: bool = True) -> Recorded:
        return run(program, arguments, ranks, native)

    return record


@pytest.mark.parametrize("native", [True, pytest.param(False, marks=pytest.mark.thorough)], ids=["native", "python"])
def test_each_phase_takes_the_delay_that_was_put_in_it(record: Record, native: bool) -> None:
    job = record("phases.py", native=native)
    # The backward pass sleeps once by itself and once in the recomputation inside it.
    expected = {
        "data": 1,
        "forward": 1,
        "recompute": 1,
        "backward": 2,
        "optimizer": 1,
        "evaluation": 1,
        "phase:thinking": 1,
    }
    for phase, delays in expected.items():
        shortest = next(length for length in lengths(job.spans(phase)) if length > DELAY_NS / 2)
        assert delays * DELAY_NS <= shortest < delays * DELAY_NS + SLACK_NS, phase
    saved = [length for length in lengths(job.spans("checkpoint")) if length > DELAY_NS]
    assert len(saved) == 8
    assert len(job.spans("checkpoint")) == 16  # the program names one of its own parts so
    assert set(job.tables[0].spans["state"].tolist()) == {schema.STATE["done"]}


def test_phases_of_the_mean_step_are_the_delays_and_sum_to_it(record: Record) -> None:
    rank = record("phases.py").rank
    assert rank.phases_ns is not None
    assert rank.user_phases_ns is not None
    assert sum(rank.phases_ns.values()) == rank.step_ns
    job = record("phases.py")
    begin, end, num_steps = job.window("optimizer")
    for phase in ("data", "recompute", "optimizer", "evaluation"):  # nothing lies in these
        inside = [span for span in job.spans(phase) if begin <= span["begin_ns"] < end]
        mean = sum(int(span["end_ns"] - span["begin_ns"]) for span in inside) / num_steps
        assert abs(rank.phases_ns[phase] - mean) <= 1, phase
    for phase in ("data", "forward", "recompute", "backward", "optimizer", "checkpoint", "evaluation"):
        assert rank.phases_ns[phase] >= DELAY_NS, phase
    assert DELAY_NS <= rank.user_phases_ns["thinking"] <= rank.phases_ns["other"]
    # One full collection a step, of all that torch holds; the collector is off otherwise.
    assert len(record("phases.py").spans("garbage_collection")) in (7, 8)  # the last is recorded by what follows it
    assert rank.phases_ns["garbage_collection"] > 1_000_000
    assert rank.phases_ns["compile"] == 0


def test_both_ways_to_checkpoint_activations_show_what_is_computed_again(record: Record) -> None:
    job = record("phases.py")
    recomputed, backward = job.spans("recompute"), job.spans("backward")
    assert len(recomputed) == 8
    assert len(backward) == 8 + 4  # every second step re-enters autograd, with a backward pass inside the backward pass
    outer = backward[backward["end_ns"] - backward["begin_ns"] > DELAY_NS]
    for span in recomputed:
        assert ((outer["begin_ns"] < span["begin_ns"]) & (span["end_ns"] < outer["end_ns"])).sum() == 1


def test_a_program_that_marks_its_steps_has_those_and_no_others(record: Record) -> None:
    job = record("phases.py", "mark")
    assert len(job.spans("optimizer")) == 8
    assert job.spans(events.STEP)["microbatch"].tolist() == [1, 2, 3, 4]
    assert job.spans(events.STEP)["step"].tolist() == [2, 3, 4, 5]  # the optimizer had ended two before the first mark
    assert job.summary.steps.count == 4
    assert job.rank.phases_ns is not None
    begin, end, num_steps = job.window(events.STEP)
    assert job.rank.step_ns == (end - begin) // num_steps
    assert job.rank.phases_ns["optimizer"] >= 2 * DELAY_NS


def wrapped(record: Record, wrapper: str) -> Recorded:
    """Run the model in this wrapper."""
    return record("models.py", wrapper, "FOLDER/saved", ranks=1 if wrapper in ("none", "compiled") else 2)


@pytest.mark.parametrize("wrapper", ["ddp", pytest.param("fsdp1", marks=pytest.mark.thorough), "fsdp2", "compiled"])
def test_forward_and_evaluation_are_the_outermost_modules(record: Record, wrapper: str) -> None:
    job = wrapped(record, wrapper)
    assert len(job.spans("forward")) == 4
    assert len(job.spans("evaluation")) == 4
    if wrapper != "compiled":  # compiled code does not sleep
        assert lengths(job.spans("forward"))[0] >= 10_000_000
    assert job.summary.steps.count == 4
    backward = job.spans("backward")
    for span in job.spans("forward"):
        assert not ((backward["begin_ns"] < span["begin_ns"]) & (span["begin_ns"] < backward["end_ns"])).any()


def test_a_model_without_a_wrapper_is_found_at_the_first_optimizer_step(record: Record) -> None:
    # 3 steps, one that fails, one after it, one through torch.compile. Pickling and scripting go unharmed, unseen.
    job = wrapped(record, "none")
    forward = job.spans("forward")
    assert forward["state"].tolist() == [schema.STATE[s] for s in ("done", "done", "done", "failed", "done", "done")]
    assert len(job.spans("evaluation")) == 4
    assert len(job.spans("checkpoint")) == 0


def test_compilation_is_recorded_and_is_no_work_of_the_model(record: Record) -> None:
    job = wrapped(record, "compiled")
    assert len(job.spans("compile")) >= 2  # the forward pass, with gradients and without
    first = job.spans("forward")[0]
    inside = [span for span in job.spans("compile") if first["begin_ns"] <= span["begin_ns"] < first["end_ns"]]
    assert sum(int(span["end_ns"] - span["begin_ns"]) for span in inside) > 0.5 * (first["end_ns"] - first["begin_ns"])
    assert len(wrapped(record, "ddp").spans("compile")) == 0


def test_checkpoints_of_every_kind_are_recorded_once(record: Record) -> None:
    assert len(wrapped(record, "ddp").spans("checkpoint")) == 2  # save and load
    job = wrapped(record, "fsdp2")
    threads = job.spans("checkpoint")["thread"]
    own = job.spans("optimizer")["thread"][0]
    assert (threads == own).sum() == 6  # three times the state is gathered; then save, async_save, load
    assert (threads != own).sum() == 1  # what async_save writes meanwhile


@pytest.mark.parametrize(
    ("wrapper", "shares", "communication"),
    [
        ("none", 1, 0),
        ("ddp", 1, MODEL_BYTES),  # buckets
        pytest.param("fsdp1", 2, BLOCK_BYTES, marks=pytest.mark.thorough),  # one block gathered
        ("fsdp2", 2, BLOCK_BYTES),
    ],
)
def test_memory_categories_are_those_of_the_model_and_optimizer_used(
    record: Record, wrapper: str, shares: int, communication: int
) -> None:
    job = wrapped(record, wrapper)
    expected = dict.fromkeys(("parameters", "gradients", "optimizer_state"), MODEL_BYTES // shares)
    expected["communication"] = communication
    categories = job.rank.memory_categories
    assert {name: categories[name] for name in expected} == expected
    assert job.rank.peak_bytes is not None
    assert categories["other"] is not None
    assert categories["other"] > 0.9 * job.rank.peak_bytes


def test_activations_are_what_the_forward_pass_leaves_behind(record: Record) -> None:
    # memory.py keeps 64 MiB for the backward pass, holds 32 MiB of gradients at the end of a step, and fails at last.
    job = record("memory.py")
    activations = job.rank.memory_categories["activations"]
    assert activations is not None
    assert 64 << 20 <= activations < 72 << 20
    assert job.rank.memory_categories["gradients"] == 32 << 20
    assert min(job.samples("uss_bytes")) > 32 << 20


def test_out_of_memory_says_what_held_most(record: Record) -> None:
    job = record("memory.py")
    (seen,) = job.rank.out_of_memory
    assert seen.device == "cpu"
    assert seen.held_bytes["parameters"] == 32 << 20
    assert seen.held_bytes["optimizer_state"] == 32 << 20
    assert seen.largest == "other"  # 256 MiB that are no part of the model
    assert seen.live_bytes is not None
    assert seen.live_bytes > 320 << 20
    (snapshot,) = job.tables[0].snapshots
    assert (snapshot.state, snapshot.why, snapshot.device) == ("written", "out of memory", "cpu")
    assert snapshot.held_bytes["optimizer_state"] == 32 << 20
    assert wrapped(record, "none").rank.out_of_memory == ()
