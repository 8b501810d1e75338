"""The Python tap writes what the native tap writes."""

from pathlib import Path
from typing import Any

import pytest

from dtprof.records import schema
from dtprof.records.reader import open_run
from dtprof.records.tables import RankTables
from tests import jobs

pytestmark = pytest.mark.jobs
SAME_FLAGS = schema.FLAG["async"] | schema.FLAG["device"] | schema.FLAG["no_work"] | schema.FLAG["inferred_site"]


def sizes_of(tables: RankTables, tag: int) -> list[tuple[int, ...]]:
    """Return the sizes of an uneven operation."""
    return list(tables.sizes.get(tag, ()))


def describe(tables: RankTables) -> list[dict[str, Any]]:
    """Return what must not depend on the tap, of every operation, in the order of its group."""
    rows = []
    for row in tables.operations:
        group = tables.groups[int(row["group"])]
        site = tables.sites.get(int(row["site"]))
        tag = int(row["tag"])
        rows.append(
            {
                "group": (group.name, group.description, group.ranks, group.backend),
                "kind": int(row["kind"]),
                "seq": int(row["seq"]),
                "op": tables.raw_ops[row["op"]],
                "numel": int(row["numel"]),
                "dtype": int(row["dtype"]),
                "reduce_op": int(row["reduce_op"]),
                "peer": int(row["peer"]),
                "sizes or tag": sizes_of(tables, tag) if row["kind"] == schema.KIND["collective"] else tag,
                "site": site and (Path(site.file).name, site.line, site.function, site.api),
                "flags": int(row["flags"]) & SAME_FLAGS,
                "step": int(row["step"]),
                "failed": bool(row["state"] == schema.STATE["failed"]),
            }
        )
    return sorted(rows, key=lambda one: (one["group"], one["kind"], one["seq"]))


def test_both_taps_write_the_same_records_for_every_call(tmp_path: Path) -> None:
    described: dict[str, list[list[dict[str, Any]]]] = {}
    for tap, options in {"native": [], "python": ["--no-native"]}.items():
        run, scratch = tmp_path / tap, tmp_path / f"scratch-{tap}"  # stores of its own for each job
        scratch.mkdir()
        jobs.recorded(run, jobs.torchrun(2, "-m", "tests.completeness.programs.every_call", str(scratch)), *options)
        ranks = list(open_run(run).load_all())
        assert [tables.tap for tables in ranks] == [tap, tap]
        described[tap] = [describe(tables) for tables in ranks]
        phases = [[tables.ops[row["op"]] for row in tables.spans] for tables in ranks]
        assert phases[0].count("backward") == 11  # 8 differentiable collectives, DDP twice, FSDP2
    for native, python in zip(described["native"], described["python"], strict=True):
        assert len(native) > 140
        differing = [(one, other) for one, other in zip(native, python, strict=True) if one != other]
        assert differing == []
