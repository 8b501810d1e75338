"""Short names of calls."""

import pytest

from dtprof.job.api_names import find_apis, name_site, short_name
from tests.builders import RankBuilder


@pytest.mark.parametrize(
    ("api", "uses_ddp", "expected"),
    [
        ("all_reduce", False, "all_reduce"),
        ("all_gather_object", False, "all_gather_object"),
        ("Tensor.backward", True, "ddp"),
        ("Tensor.backward", False, "backward"),
        ("DistributedDataParallel.__init__", True, "ddp init"),
        ("Module._wrapped_call_impl", True, "ddp"),
        ("Module._wrapped_call_impl", False, "forward"),
        ("Optimizer.profile_hook_step.<locals>.wrapper", False, "optimizer.step"),
        ("Outer.method.<locals>.exchange", False, "exchange"),
        ("deprecated.__call__.<locals>.wrapper", False, ""),
        ("", False, ""),
    ],
)
def test_a_call_is_named_as_the_user_knows_it(api: str, uses_ddp: bool, expected: str) -> None:
    assert short_name(api, uses_ddp=uses_ddp) == expected


def test_ddp_is_not_said_to_issue_what_it_never_does() -> None:
    # The backward pass of an all_gather by torch.distributed.nn scatters gradients, in the thread that runs DDP's.
    rank = RankBuilder(0, world_size=2, features=("ddp",))
    site = rank.site("Tensor.backward")
    for number, op in enumerate(("all_reduce", "scatter", "reduce_scatter")):
        rank.op(op, 100 * number, 100 * number + 50, site=site)
    tables = rank.tables()
    apis = find_apis(tables, tables.operations)
    assert [apis.names[i] for i in apis.of_operation.tolist()] == ["ddp", "backward", "backward"]
    assert [name_site(tables, site, op) for op in ("all_reduce", "scatter")] == ["ddp", "backward"]
