"""What groups are for: the dimensions of meshes, whatever group they use, and the names of other frameworks."""

from pathlib import Path

import pytest

from dtprof.records.axis_names import axis_of
from dtprof.records.reader import open_run
from dtprof.records.tables import Mesh
from tests import jobs


@pytest.mark.parametrize(
    ("name", "axis"),
    [
        ("mesh_dp", "dp"),
        ("mesh_dp_cp", "dp_cp"),
        ("mesh_dim_0", None),
        ("TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("_TENSOR_MODEL_PARALLEL_GROUP", "tp"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pp"),
        ("DATA_PARALLEL_GROUP", "dp"),
        ("DATA_PARALLEL_GROUP_GLOO", "dp"),
        ("DATA_PARALLEL_GROUP_WITH_CP", "dp_cp"),
        ("CONTEXT_PARALLEL_GROUP", "cp"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "ep"),
        ("_EXPERT_DATA_PARALLEL_GROUP", "edp"),
        ("default_pg", None),
        ("undefined", None),
        ("", None),
    ],
)
def test_names_of_groups_tell_their_axis(name: str, axis: str | None) -> None:
    assert axis_of(name) == axis


@pytest.mark.jobs
@pytest.mark.parametrize(
    "options", [(), pytest.param(("--no-native",), marks=pytest.mark.thorough)], ids=["native", "python"]
)
def test_every_group_has_the_axis_that_it_serves(tmp_path: Path, options: tuple[str, ...]) -> None:
    jobs.recorded(tmp_path / "run", jobs.forked(4, jobs.PROGRAMS / "meshes.py"), *options)
    for tables in open_run(tmp_path / "run").load_all():
        rank, groups = tables.rank, list(tables.groups.values())
        assert tables.problems == ()
        assert tables.notes == ()
        row, column = divmod(rank, 2)
        axes = {group.axis: group.ranks for group in groups}
        # The joined dimensions have the default group (of all ranks) themselves, and so has `world`: the group takes
        # the name of what is no join.
        last = {0: "edp", 2: "edp"}.get(rank, "pp")
        assert set(axes) == {"dp", "tp", "world", "cp", "pp" if rank in (0, 3) else "ep", last} | (
            {"odd"} if rank % 2 else set()
        )
        assert axes.get("odd", (rank,)) == (rank,)
        assert axes["dp"] == (column, column + 2)
        assert axes["tp"] == (2 * row, 2 * row + 1)
        assert axes["world"] == (0, 1, 2, 3)
        assert axes["cp"] == ((0, 1) if rank < 2 else (2, 3))
        assert {group.backend for group in groups} == {"gloo"}
        assert {group.timeout_s for group in groups} == {1800.0}

        by_name = {mesh.names: mesh for mesh in tables.meshes}
        assert len(by_name) == len(tables.meshes) == 4
        grid, default = by_name["dp", "tp"], next(group.name for group in groups if group.axis == "world")
        assert (grid.shape, grid.coordinate, grid.device_type, grid.flattened) == ((2, 2), (row, column), "cpu", False)
        assert by_name["world",] == Mesh(
            names=("world",), shape=(4,), coordinate=(rank,), groups=(default,), device_type="cpu"
        )
        assert by_name["dp_tp",].flattened
        assert by_name["dp_tp",].coordinate == (rank,)
        assert by_name["cp",].groups == (next(group.name for group in groups if group.axis == "cp"),)
        wanted = {"dp": row, "tp": column, "cp": rank % 2}
        assert wanted.items() <= tables.coordinates.items()
        assert not {"world", "dp_tp"} & tables.coordinates.keys()  # they say nothing that these do not


@pytest.mark.jobs
def test_groups_that_sum_up_parts_of_activations_by_sharded_parameters_are_tensor_parallel(tmp_path: Path) -> None:
    jobs.recorded(tmp_path / "run", jobs.forked(4, jobs.PROGRAMS / "sharded_by_hand.py"))
    for tables in open_run(tmp_path / "run").load_all():
        assert tables.notes == ()
        axes = {group.description: group.axis for group in tables.groups.values()}
        assert {name: axes[f"mesh_{name}"] for name in ("columns", "copies", "shards")} == {
            "columns": "tp",
            "copies": "copies",
            "shards": "shards",
        }
