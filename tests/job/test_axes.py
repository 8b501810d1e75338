"""Axes of parallelism."""

import pytest

from dtprof.job.axes import (
    SAME_SAMPLES,
    SAME_TOKENS,
    axis_sizes,
    axis_words,
    distinct_groups,
    find_replicas,
    name_groups,
    purpose_of,
)
from dtprof.records.axis_names import plain_axis
from dtprof.records.tables import Group


def group(name: str, ranks: tuple[int, ...] = (), *, axis: str | None = None, description: str = "") -> Group:
    return Group(name=name, description=description, size=len(ranks), ranks=ranks, axis=axis)


@pytest.mark.parametrize(
    ("axis", "description", "purpose"),
    [("tp", "mesh_tp", "tp"), (None, "losses", "losses"), (None, "undefined", ""), (None, "", "")],
)
def test_a_group_is_for_its_axis_else_for_what_the_program_says(
    axis: str | None, description: str, purpose: str
) -> None:
    assert purpose_of(group("7", axis=axis, description=description)) == purpose


def test_the_group_of_all_ranks_is_the_world_for_people() -> None:
    assert [axis_words(axis) for axis in ("default_pg", "tp", "losses", "1")] == ["world", "tp", "losses", "group 1"]


def test_a_group_is_named_by_its_purpose_and_by_its_name_where_others_serve_the_same() -> None:
    groups = [
        group("0", description="default_pg"),
        group("1", axis="tp", description="mesh_tp"),
        group("2", axis="tp", description="mesh_tp"),
        group("3"),
    ]
    assert name_groups(groups) == {"0": "world", "1": "tp (1)", "2": "tp (2)"}


@pytest.mark.parametrize(
    ("sizes", "plain"),
    [
        ({"tp": 2, "pp": 1}, "tp"),
        ({"pp": 2}, "pp"),  # DeepSpeed has no tensor-parallel group then
        ({"tp": 2, "pp": 2}, "mp"),
        ({}, "mp"),
    ],
)
def test_model_parallel_ranks_of_one_axis_go_by_it(sizes: dict[str, int], plain: str) -> None:
    degree = 4 if len(sizes) == 2 and set(sizes.values()) == {2} else 2
    assert plain_axis("mp", degree, sizes) == plain


def test_an_axis_is_as_long_as_the_largest_group_along_it() -> None:
    assert axis_sizes([("tp", 2), (None, 8), ("dp", 4), ("tp", 1), ("", 9)]) == {"dp": 4, "tp": 2}


def test_groups_that_several_ranks_describe_count_once() -> None:
    same = [group("3", (0, 1)), group("3", (0, 1)), group("3", (2, 3))]
    assert [group.ranks for group in distinct_groups(same)] == [(0, 1), (2, 3)]


def test_ranks_of_a_tensor_and_a_pipeline_group_share_tokens_and_of_a_context_group_samples() -> None:
    # 8 ranks, 2 x tp 2 x cp 2: ranks 0, 1 are one tp group, 0, 2 one cp group, and so on; 0 to 3 one replica.
    tp = [group(f"tp{i}", (i, i + 1), axis="tp") for i in (0, 2, 4, 6)]
    cp = [group(f"cp{i}", (i, i + 2), axis="cp") for i in (0, 1, 4, 5)]
    assert find_replicas(range(8), [*tp, *cp], SAME_TOKENS) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert find_replicas(range(8), [*tp, *cp], SAME_SAMPLES) == [[0, 1, 2, 3], [4, 5, 6, 7]]
