"""Short names of calls."""

import pytest

from dtprof.job.api_names import short_name


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
