"""Buckets of DDP, told apart by their order and size within a backward pass."""

from dtprof.records import events
from dtprof.records.rank_log.ddp_buckets import label_buckets
from dtprof.records.sites import Label
from dtprof.records.tables import BucketLayout
from tests.builders import START_NS, RankBuilder

MIB = 1 << 20
BACKWARD = "Tensor.backward"


def texts(rank: RankBuilder, *layouts: BucketLayout) -> list[str]:
    """Return what the operations are labelled as; nothing where they are not."""
    tables = rank.tables()
    label_buckets(
        tables.operations, tables.spans, ops=tables.ops, groups=tables.groups, sites=tables.sites, layouts=layouts
    )
    labels = [tables.sites[int(row["site"])].label for row in tables.operations]
    return [label.text if label else "" for label in labels]


def layout(*mebibytes: int, t: int = 0, reducer: int = 1, group: str = "0") -> BucketLayout:
    return BucketLayout(
        t_ns=START_NS + t,
        reducer=reducer,
        group=group,
        sizes=tuple(size * MIB for size in mebibytes),
        num_parameters=7,
    )


def passes(*rows: tuple[int, int], api: str = BACKWARD, dtype: str = "float32") -> RankBuilder:
    """Return a rank with a backward pass from 100 to 200, and all_reduces of so many MiB at these times."""
    rank = RankBuilder(0, world_size=2)
    rank.span(events.BACKWARD, 100, 200)
    for t, mebibytes in rows:
        rank.op("all_reduce", t, t + 1, nbytes=mebibytes * MIB, api=api, dtype=dtype)
    return rank


def test_buckets_are_counted_in_their_order() -> None:
    rank = passes((110, 2), (120, 3), (130, 2))
    assert texts(rank, layout(2, 3, 2)) == ["ddp bucket 0, 2 MiB", "ddp bucket 1, 3 MiB", "ddp bucket 2, 2 MiB"]


def test_each_backward_pass_counts_anew_and_one_inside_another_is_part_of_it() -> None:
    rank = passes((110, 2), (150, 2))
    rank.span(events.BACKWARD, 140, 160)
    rank.span(events.BACKWARD, 300, 400)
    rank.op("all_reduce", 310, 311, nbytes=2 * MIB, api=BACKWARD)
    assert texts(rank, layout(2, 2)) == ["ddp bucket 0, 2 MiB", "ddp bucket 1, 2 MiB", "ddp bucket 0, 2 MiB"]


def test_half_the_bytes_are_a_bucket_too() -> None:
    assert texts(passes((110, 1), (120, 2)), layout(2, 4)) == ["ddp bucket 0, 2 MiB", "ddp bucket 1, 4 MiB"]


def test_two_models_in_one_backward_pass_have_buckets_of_their_own() -> None:
    rank = passes((110, 2), (120, 5), (130, 3), (140, 6))
    found = texts(rank, layout(2, 3), layout(5, 6, reducer=2))
    assert found == ["ddp bucket 0, 2 MiB", "ddp bucket 0, 5 MiB", "ddp bucket 1, 3 MiB", "ddp bucket 1, 6 MiB"]


def test_rebuilt_buckets_are_known_one_pass_before_they_are_reported() -> None:
    rank = passes((110, 2), (120, 3))
    assert texts(rank, layout(5, t=0), layout(2, 3, t=250)) == ["ddp bucket 0, 2 MiB", "ddp bucket 1, 3 MiB"]


def test_what_else_the_backward_pass_reduces_is_distinguished() -> None:
    rank = passes((110, 2))
    rank.op("all_reduce", 120, 121, nbytes=7 * 4, api=BACKWARD, dtype="int32")
    rank.op("all_reduce", 130, 131, nbytes=100, api=BACKWARD)
    rank.op("all_reduce", 140, 141, nbytes=100, api="all_reduce")
    rank.op("all_reduce", 250, 251, nbytes=2 * MIB, api="all_reduce")
    assert texts(rank, layout(2)) == [
        "ddp bucket 0, 2 MiB",
        "ddp map of used parameters",
        "ddp reduction of gradients",
        "",
        "",
    ]


def test_other_groups_are_left_alone() -> None:
    rank = passes()
    other = rank.group("1", [0, 1])
    rank.op("all_reduce", 110, 111, nbytes=2 * MIB, api=BACKWARD, group=other)
    assert texts(rank, layout(2)) == [""]


def test_a_label_that_capture_set_stays() -> None:
    rank = passes((110, 2))
    tables = rank.tables()
    ((number, site),) = tables.sites.items()
    tables.sites[number] = type(site)(
        file=site.file, line=site.line, function=site.function, label=Label(api="fsdp", text="fsdp all-reduce of 0")
    )
    label_buckets(
        tables.operations, tables.spans, ops=tables.ops, groups=tables.groups, sites=tables.sites, layouts=[layout(2)]
    )
    assert tables.operations["site"].tolist() == [number]
