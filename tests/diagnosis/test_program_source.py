"""What is said of the program's source is what ran: kept in the run, or of a file that was not changed since."""

import gzip
import json
import os
from pathlib import Path

import pytest

from dtprof.diagnosis.job_state import Handler
from dtprof.diagnosis.sources.program_source import REQUIRED, ProgramSource, keep_program
from dtprof.diagnosis.verdict import decide
from tests.diagnosis.judging import build_job, gradients, with_loaders

STARTED_NS = 1_000_000_000


@pytest.mark.parametrize(("written_ns", "changed"), [(STARTED_NS - 1, False), (STARTED_NS, True)])
def test_only_a_file_that_is_as_it_was_at_the_start_is_read(tmp_path: Path, written_ns: int, changed: bool) -> None:
    source = tmp_path / "train.py"
    source.write_text("for step in range(3):\n    print(step)\n")
    os.utime(source, ns=(written_ns, written_ns))
    of_run = ProgramSource(tmp_path / "run", STARTED_NS)
    assert of_run.was_changed(str(source)) is changed
    assert (of_run.find_place(str(source), 2) is None) is changed
    assert not of_run.was_changed(str(tmp_path / "gone.py"))


LOOP = """\
import torch.distributed as dist

def train(loader, loss):
    for step in loader:
        if step % 10:
            continue
        try:
            loss.backward()
        except RuntimeError:
            dist.barrier()
"""


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, Path]:
    """Return a run that keeps its program, and the source file, which the user has edited since."""
    source = tmp_path / "train.py"
    source.write_text(LOOP)
    os.utime(source, ns=(STARTED_NS - 1, STARTED_NS - 1))
    run = tmp_path / "run"
    rows = [
        {"k": "site", "id": 1, "file": str(source), "line": 10, "function": "train"},
        {"k": "site", "id": 2, "file": "/usr/lib/python3.11/threading.py", "line": 982, "function": "run"},
    ]
    for folder in ("rank-00000.0", "node-a"):
        (run / folder).mkdir(parents=True)
    (run / "rank-00000.0" / "strings.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keep_program(run, "a", STARTED_NS)
    source.write_text("print('edited')\n")
    return run, source


def test_what_a_failed_job_keeps_of_its_program_outlives_an_edit(kept: tuple[Path, Path]) -> None:
    run, source = kept
    of_run = ProgramSource(run, STARTED_NS)
    place = of_run.find_place(str(source), 8)
    assert place is not None
    assert (place.loops, place.conditions, place.ways_past) == (((4, 10),), (), ((6, "continue"), (9, "except")))
    assert of_run.find_handlers(str(source)) == {
        10: Handler(text="except RuntimeError", line=9, call="            dist.barrier()")
    }
    assert not of_run.was_changed(str(source))


def test_a_program_kept_by_a_later_dtprof_is_read_and_one_that_lacks_a_field_is_not(kept: tuple[Path, Path]) -> None:
    run, source = kept
    document = run / "node-a" / "program.json.gz"
    program = json.loads(gzip.decompress(document.read_bytes()))
    assert set(program["fields"]) >= REQUIRED
    for names, is_read in (([*program["fields"], "calls"], True), (program["fields"][1:], False)):
        document.write_bytes(gzip.compress(json.dumps(program | {"fields": names}).encode()))
        assert (ProgramSource(run, STARTED_NS).find_place(str(source), 8) is not None) is is_read


def test_what_is_kept_is_not_replaced_by_an_edited_file(kept: tuple[Path, Path]) -> None:
    run, source = kept
    keep_program(run, "a", STARTED_NS)
    assert ProgramSource(run, STARTED_NS).find_place(str(source), 8) is not None


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"no gzip",
        gzip.compress(b"{}")[:-9],
        gzip.compress(b'{"fields": ["line"], "files": {}}'),
        gzip.compress(b'{"fields": ["\xff"], "files": {}}'),
        gzip.compress(b"[" * 10**6),
    ],
    ids=["empty", "foreign", "cut short", "of another dtprof", "not UTF-8", "hostile"],
)
def test_a_kept_program_that_cannot_be_read_counts_as_none(kept: tuple[Path, Path], document: bytes) -> None:
    run, source = kept
    (run / "node-a" / "program.json.gz").write_bytes(document)
    of_run = ProgramSource(run, STARTED_NS)
    assert of_run.find_place(str(source), 8) is None
    assert of_run.was_changed(str(source))


@pytest.mark.parametrize("changed", [True, False])
def test_the_verdict_names_a_changed_file_of_its_findings(changed: bool) -> None:
    ranks = with_loaders([4, 3, 4], exhausted=[False, True, False])
    ranks[1].closed = True
    for rank in (ranks[0], ranks[2]):
        gradients(rank, 3000, done=False)
    verdict = decide(build_job(ranks, exit_status=None, was_changed=lambda _: changed))
    reasons = [reason for reason in verdict.cannot_tell if "was changed after the job had started" in reason]
    assert len(reasons) == changed
    assert all(reason.startswith("/home/me/train.py") for reason in reasons)
