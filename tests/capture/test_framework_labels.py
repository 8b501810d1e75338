"""What frameworks do on the user's behalf carries their label: tensor parallel, ZeRO, checkpoints, averaging, join."""

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from dtprof.job.api_names import find_apis
from dtprof.records.reader import open_run
from dtprof.records.tables import RankTables
from tests import jobs

pytestmark = pytest.mark.jobs

TENSOR_PARALLEL = {
    ("scatter", "tp distribution of parameters", ""): 5,
    ("broadcast", "tp distribution of parameters", ""): 1,
    ("all_gather", "tp input of 0.up", "0.up"): 1,
    ("reduce_scatter", "tp output of 0.down", "0.down"): 1,
    ("all_gather", "tp input of 1", "1"): 1,
    ("all_reduce", "tp loss", ""): 3,
    ("reduce_scatter", "tp gradient of the input of 1", "1"): 1,
    ("all_gather", "tp gradient of the output of 0.down", "0.down"): 1,
    ("reduce_scatter", "tp gradient of the input of 0.up", "0.up"): 1,
}
CHECKPOINT = {"dcp plan", "dcp write", "dcp read"}


def sections(tables: RankTables) -> list[Counter[tuple[str, str, str]]]:
    """Count name, label and module of all operations, cut where the program calls one of its own."""
    rows = []
    for row in tables.operations:
        label = tables.sites[int(row["site"])].label
        rows.append((tables.ops[row["op"]], label.text if label else "", label.module if label else ""))
    marks = [i for i, row in enumerate(rows) if row == ("all_reduce", "", "")]
    return [Counter(rows[begin + 1 : end]) for begin, end in pairwise([*marks, len(rows)])]


def test_every_operation_of_a_framework_is_labelled(tmp_path: Path) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    command = jobs.forked(2, jobs.PROGRAMS / "frameworks.py", str(saved))
    jobs.recorded(run, command, env={"PYTHONWARNINGS": "ignore"})
    for tables in open_run(run).load_all():
        assert tables.problems == ()
        assert tables.notes == ()
        tensor_parallel, dtensor, uneven, averaging, checkpoint, ring = sections(tables)
        assert tensor_parallel == TENSOR_PARALLEL
        assert dtensor == {
            ("scatter", "dtensor distribution", ""): 1,
            ("all_gather", "dtensor redistribution S(0) to R", ""): 1,
        }
        assert averaging == {("all_reduce", "local SGD averaging", ""): 1}
        assert {label for _, label, _ in checkpoint} == CHECKPOINT
        assert ring == {("all_gather", "cp gathering of shards", ""): 1, ("barrier", "", ""): 1}
        check_uneven(uneven, tables.rank)
        assert len(set(tables.operations["thread"].tolist())) == 2  # async_save writes from a thread of its own
        apis = find_apis(tables, tables.operations)
        found = {apis.names[i] for i in apis.of_operation}
        assert found == {"tp", "dtensor", "ddp", "zero", "join", "local_sgd", "dcp", "cp", "all_reduce", "barrier"}


def check_uneven(found: Counter[tuple[str, str, str]], rank: int) -> None:
    """Rank 0 has two batches, rank 1 three: the third of rank 1 is shadowed by rank 0."""
    labels: Counter[str] = Counter()
    for (_, label, _), count in found.items():
        labels[label] += count
    assert labels["ddp bucket 0, 0.000275 MiB"] == 2 + rank  # 4 * (8 * 8 + 8) bytes
    assert labels["zero broadcast of parameters"] == 6  # two tensors a step; also as a shadow
    assert labels["join count of ranks with inputs"] == 4
    assert labels["join shadowing of collectives"] == 2 - rank  # the bucket; who was last, of both
    assert labels["zero consolidation of the state dict"] > 0
    assert "" not in labels
