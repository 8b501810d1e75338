"""What was recorded in each call and scenario: coverage.json, and docs/reference/coverage.md which is made from it.

Jobs check that the table says what is recorded; a test checks that the page says what the table says.

python -m tests.completeness.coverage            runs all jobs, and writes the table and the page
python -m tests.completeness.coverage --page     writes the page
"""

import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from tests.completeness import recordings
from tests.completeness.comparison import BELOW_THE_HOOK, GLOO_COUNTS_OTHERWISE
from tests.completeness.recordings import Observation
from tests.jobs import REPOSITORY

TABLE = Path(__file__).with_name("coverage.json")
PAGE = REPOSITORY / "docs" / "reference" / "coverage.md"
PROCESSES = "Processes"
"""The section of what is not run in one process after the other scenarios."""
Row = dict[str, Any]

HEAD = """# Coverage

This page lists every call and every framework scenario whose operations are checked to be recorded, each exactly once.

The check: programs make each call and run each scenario on gloo, on 2 ranks and where it makes a difference on 4.
Before and after each they read gloo's own number of the last operation of every group, which gloo counts below
everything that dtprof hooks. On every rank and for every group the run must hold as many operations as gloo counted
meanwhile, under the native hook and under the Python hook, and as many between the scenarios and altogether. The tests
are in `tests/completeness/`; this page is made by `python -m tests.completeness.coverage`, and the tests fail when a
recorded run says otherwise.

Seen with torch {torch}: {num_calls} calls, {num_scenarios} scenarios. The operators are those of torch's `c10d`
namespace, with the largest number that a rank issues; "x 2" is two of them.
"""
EXCEPTIONS = """
## Where the counts differ

{reasons}
- A call that torch or gloo refuses is in the run as failed where it got as far as an operator, and gloo may not have
  counted it.
- Fake process groups and groups of several back ends have no counter of gloo's; there the run must hold what the
  program knows to have issued.

## What is not seen

- Calls of a back-end object (`group._get_backend(device).allreduce(...)`) pass below the dispatcher: gloo counts one,
  the run holds none. Torch uses this for no collective of the user.
- RPC (TensorPipe), the calls of back-end objects with which it starts, and operators of symmetric memory
  (`symm_mem::...`, which asynchronous tensor parallel uses on GPUs) are not `c10d`.
- A CUDA graph replays its operations below the dispatcher: they are in the run once, as the capture issued them. Each
  replay is a span, `graph_replay`, with its time on the device, and `cannot_tell` counts them.
- Fake tensors, meta tensors and `LocalTensorMode` communicate nothing: nothing is recorded, and gloo counts nothing.
- A job within a rank (a script that it starts, a process that it forks) is no rank of the job; one line says so.

What torch itself refuses on CPU (rows with a message) cannot be checked there. The messages are the same without
dtprof.
"""


def rows_of(ranks: list[Observation]) -> list[Row]:
    """Return what the ranks of one job recorded in each of its measurements, in order."""
    rows = []
    for measured in zip(*[one.measurements for one in ranks], strict=True):
        operators: Counter[str] = Counter()
        for rank, one in zip(ranks, measured, strict=True):
            operators |= one.operators(rank.tables)
        first = measured[0]
        counts = {str(len(ranks)): dict(sorted(operators.items()))}
        rows.append({"section": first.section, "name": first.name, "refused": first.refused, "operators": counts})
    return rows


def merge(rows: list[Row]) -> list[Row]:
    """Return one row for each name, in the order of sections."""
    merged: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row["section"], row["name"])
        merged.setdefault(key, row | {"operators": {}})["operators"].update(row["operators"])
    sections = list(dict.fromkeys(section for section, _ in merged))
    return sorted(merged.values(), key=lambda row: sections.index(row["section"]))


def read() -> dict[str, Any]:
    """Return the table."""
    table: dict[str, Any] = json.loads(TABLE.read_text())
    return table


def rows_for(rows: list[Row], num_ranks: int) -> list[Row]:
    """Return the rows of a table that a job of this size should give."""
    size = str(num_ranks)
    chosen = [row for row in rows if size in row["operators"]]
    return [row | {"operators": {size: row["operators"][size]}} for row in chosen]


def measure() -> dict[str, Any]:
    """Run all jobs under the native hook, and return the table."""
    with tempfile.TemporaryDirectory() as name:
        folders = iter([Path(name, str(i)) for i in range(20)])

        def new_folder() -> Path:
            folder = next(folders)
            folder.mkdir()
            return folder

        calls = recordings.record_calls(new_folder())
        scenarios = [rows_of(recordings.record_scenarios(new_folder(), size)) for size in recordings.SIZES]
        for way in recordings.WAYS:
            scenarios += [rows_of(attempt) for attempt in recordings.record_workers(new_folder(), way)]
    merged = merge([row for rows in scenarios for row in rows])
    return {"torch": calls[0].tables.torch_version, "calls": merge(rows_of(calls)), "scenarios": merged}


def write(table: dict[str, Any]) -> None:
    """Write the table, one row a line."""
    parts = [f'"torch": {json.dumps(table["torch"])}']
    parts += [
        f'"{key}": [\n' + ",\n".join(json.dumps(row) for row in table[key]) + "\n]" for key in ("calls", "scenarios")
    ]
    TABLE.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def render(table: dict[str, Any]) -> str:
    """Return the page."""
    head = HEAD.format(
        torch=table["torch"].partition("+")[0],
        num_calls=len(table["calls"]),
        num_scenarios=len(table["scenarios"]),
    )
    reasons = "\n".join(f"- `{op}`: {reason}." for op, reason in GLOO_COUNTS_OTHERWISE.items())
    parts = [head, EXCEPTIONS.format(reasons=reasons)]
    for title, key, column in (("Calls", "calls", "call"), ("Scenarios", "scenarios", "scenario")):
        parts.append(f"\n## {title}\n")
        for section in dict.fromkeys(row["section"] for row in table[key]):
            parts.append(f"\n### {section}\n\n| {column} | ranks | recorded |\n|---|---|---|\n")
            parts += [_line(row) for row in table[key] if row["section"] == section]
    return "".join(parts)


def _line(row: Row) -> str:
    sizes = sorted(row["operators"], key=int)
    counts = row["operators"][sizes[0]]
    seen = ", ".join(f"`{op}`" + (f" x {count}" if count > 1 else "") for op, count in counts.items())
    text = seen or ("nothing: see below the hook" if row["name"] in BELOW_THE_HOOK else "nothing")
    if row["refused"] is not None:
        text += f'; torch refuses: "{row["refused"]}"'
    return f"| {row['name']} | {', '.join(sizes)} | {text} |\n"


if __name__ == "__main__":
    if "--page" not in sys.argv:
        write(measure())
    PAGE.write_text(render(read()))
