"""What the rules get of a rank, from its tables."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from dtprof.diagnosis.sources.recorded_ranks import rank_state
from dtprof.records import schema
from dtprof.records.codes import DTYPES, REDUCE_OPS
from dtprof.session.run_diagnosis import diagnose_run
from tests.builders import RankBuilder, write_run
from tests.diagnosis.judging import ranks_in_step


def test_names_of_codes_are_those_of_the_format() -> None:
    assert tuple(name for name, _ in schema.DTYPES) == DTYPES
    assert schema.REDUCE_OPS == REDUCE_OPS


def test_only_the_newest_operations_are_kept_one_by_one() -> None:
    ranks = ranks_in_step(2, 2)
    tables = replace(ranks[0].tables(), world_size=1_000_000)
    assert len(rank_state(tables, exit=None, stack=None, alive=None).operations) == 4
    many = np.repeat(tables.operations, 100)
    kept = rank_state(replace(tables, operations=many), exit=None, stack=None, alive=None)
    assert len(kept.operations) == 256


def test_ranks_that_ran_two_builds_of_torch_are_named_with_them(tmp_path: Path) -> None:
    builds = ("2.13.0+cpu", "2.13.0+cpu", "2.11.0+cu130")
    ranks = [RankBuilder(rank, 3, torch_version=build) for rank, build in enumerate(builds)]
    verdict = diagnose_run(write_run(tmp_path / "run", ranks))
    assert (verdict.outcome, verdict.cannot_tell) == ("risk", ())
    finding = verdict.findings[-1]
    assert (finding.kind, finding.culprit_ranks) == ("version-mismatch", (2,))
    assert finding.summary == ("Ranks run different versions of torch: rank 2 2.11.0+cu130; ranks 0, 1 2.13.0+cpu.")
