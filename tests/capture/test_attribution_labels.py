"""Operations carry the attribution label of their thread."""

from pathlib import Path

import pytest

from tests import jobs

pytestmark = pytest.mark.jobs


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
def test_labels_nest_and_belong_to_their_thread(tmp_path: Path, native: bool) -> None:
    tables = jobs.recorded_alone("labelled.py", tmp_path, native=native)
    sites = [tables.sites[int(row["site"])] for row in tables.operations]
    assert [site.label and site.label.module for site in sites] == ["layers.0", "layers.1", None, None]
    assert {Path(site.file).name for site in sites} == {"labelled.py"}
    assert sites[0].line == sites[1].line
    assert [(row["stage"], row["microbatch"]) for row in tables.spans] == [(3, 5)]
