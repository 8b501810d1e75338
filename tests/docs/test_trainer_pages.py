"""The pages of the reference trainer name what it has."""

import re
from dataclasses import fields

import pytest

from reference_trainer.faults import FAULTS, Fault, explain
from tests.docs.pages import load

ROWS = {
    cells[0].strip("`"): cells
    for line in load("docs/reference/trainer-faults.md").path.read_text().splitlines()
    if line.startswith("| `") and (cells := [cell.strip() for cell in line.strip("|").split(" | ")])
}

OPTIONS = (
    *("corpus", "tokenizer", "vocabulary-size", "data-workers", "evaluate-every", "metrics", "mfu", "tensorboard"),
    *("checkpoint", "checkpoint-every", "checkpoint-mode", "keep", "resume", "staleness"),
)


def describe_keys(fault: type[Fault]) -> str:
    rank = "rank" if fault.default_rank is None else f"rank={fault.default_rank}"
    others = [f"{field.name}={field.default}" for field in fields(fault) if field.init and field.name != "rank"]
    return f"`{','.join([rank, *others])}`"


def test_every_fault_is_on_its_page_and_no_other() -> None:
    assert list(ROWS) == list(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_described_as_it_is(name: str) -> None:
    fault = FAULTS[name]
    _, keys, does, finding = ROWS[name]
    assert keys == describe_keys(fault)
    assert does == explain(fault) + (" Needs `--pp`." if fault.needs_pipeline else "")
    assert finding == (f"`{fault.finding}`" if fault.finding else f"none: `{fault.figure}` of the summary")


def test_options_of_runs_are_explained() -> None:
    text = load("docs/reference/trainer-runs.md").path.read_text()
    for flag in OPTIONS:
        assert re.search(rf"`--{flag}\b", text), flag
