"""What can be wrong with a job: one rule a file, which declares the kinds of findings it gives; here in order."""

from typing import Protocol

from dtprof.diagnosis.rules import (
    argument_mismatch,
    backend_stall,
    collective_in_except,
    device_stall,
    group_creation_mismatch,
    group_order_inversion,
    group_order_risk,
    long_operation,
    p2p_deadlock_cycle,
    p2p_size_mismatch,
    p2p_tag_mismatch,
    p2p_unmatched,
    pipeline_schedule_mismatch,
    rank_crashed,
    rank_exited,
    rank_killed,
    rank_never_came,
    rank_never_joined,
    rank_skipped_collective,
    rank_stuck,
    shared_group,
    slow_rank,
    step_mismatch,
    thread_order,
    unequal_timeouts,
    uneven_inputs,
    unwaited_async,
    wrong_group,
)


class Rule(Protocol):
    """A module of this folder."""

    @property
    def KINDS(self) -> tuple[str, ...]:  # noqa: N802
        """Kinds of the findings it gives."""


RULES: tuple[Rule, ...] = (
    rank_crashed,
    rank_killed,
    rank_exited,
    uneven_inputs,
    pipeline_schedule_mismatch,
    group_creation_mismatch,
    rank_skipped_collective,
    step_mismatch,
    thread_order,
    argument_mismatch,
    wrong_group,
    p2p_tag_mismatch,
    p2p_deadlock_cycle,
    p2p_size_mismatch,
    p2p_unmatched,
    group_order_inversion,
    rank_stuck,
    rank_never_came,
    rank_never_joined,
    device_stall,
    backend_stall,
    group_order_risk,
    unwaited_async,
    slow_rank,
    long_operation,
    unequal_timeouts,
    shared_group,
    collective_in_except,
)
KINDS = tuple(dict.fromkeys(kind for rule in RULES for kind in rule.KINDS))
"""Every kind of finding, each with its heading in docs/reference/diagnose.md."""
