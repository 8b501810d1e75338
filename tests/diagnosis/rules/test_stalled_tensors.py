"""Horovod's stall inspector names the tensors that ranks have not submitted."""

from functools import partial

import pytest

from tests.diagnosis import log_texts as texts
from tests.diagnosis.judging import logged
from tests.diagnosis.log_texts import Diagnose

WARNS = "[1,0]<stderr>:[2021-06-01 10:11:12: W horovod/stall_inspector.cc:107] One or more tensors were submitted"
MISSING = f"{WARNS}\n[1,0]<stderr>:Missing ranks:\n[1,0]<stderr>:"
ONE = f"{MISSING}2: [allreduce.layer.weight, allreduce.layer.bias ...]"
TWO = f"{MISSING}0: [broadcast.bool.sz]\n[1,0]<stderr>:1: [allreduce.layer.weight]"
FAULTY = {
    "rank-skipped-collective": partial(logged, ONE),
    "collective-order-mismatch": partial(logged, TWO),
}
# The exception of the rank that is missing came before, and is the cause.
SOUND = partial(logged, texts.traceback("ValueError: empty", line=7, source="step()", prefix="[rank2]: ") + f"\n{ONE}")


@pytest.mark.parametrize(
    ("text", "culprits", "op"),
    [
        (ONE, (2,), "all_reduce"),
        (TWO, (0, 1), "broadcast"),
        (f"{WARNS}\nStalled ops:allgather.mask [missing ranks: 1, 3]", (1, 3), "all_gather"),
    ],
)
def test_ranks_that_have_not_submitted_a_tensor_are_named(
    diagnose_texts: Diagnose, text: str, culprits: tuple[int, ...], op: str
) -> None:
    verdict = diagnose_texts(text)
    (finding,) = verdict.findings
    assert (verdict.outcome, finding.culprit_ranks, finding.op) == ("hang", culprits, op)
