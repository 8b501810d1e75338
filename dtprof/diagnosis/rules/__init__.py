"""The rules of diagnosis: one per file, which declares its kinds of findings and its stage.

To add a rule, copy a file and name it here.
"""

from importlib import import_module

from dtprof.diagnosis.rule import Declared, Refinement, Rule

ORDER = (
    "reported_disagreement",
    "reported_death",
    "missed_barrier",
    "stalled_tensors",
    "nccl_call_order",
    "watchdog_timeout",
    "watchdog_count",
    "store_timeout",
    "network_failure",
    "lost_peer",
    "stuck_watchdog",
    "rank_crashed",
    "failed_setup",
    "rank_killed",
    "host_silent",
    "pipeline_schedule_mismatch",
    "group_creation_mismatch",
    "repeated_call",
    "rank_skipped_collective",
    "loop_left_early",
    "skipped_before_exit",
    "skipped_before_message",
    "skipped_by_dead_thread",
    "skipped_tensor",
    "thread_order",
    "step_mismatch",
    "ranks_apart",
    "skipped_iteration",
    "extra_iterations_before_end",
    "argument_mismatch",
    "wrong_group",
    "unequal_timeouts",
    "rank_exited",
    "rank_stuck",
    "rank_never_came",
    "p2p_tag_mismatch",
    "p2p_deadlock_cycle",
    "p2p_size_mismatch",
    "p2p_unmatched",
    "p2p_new_peer",
    "buffered_sends",
    "group_order_inversion",
    "rendezvous_incomplete",
    "rank_never_joined",
    "slow_link",
    "device_stall",
    "backend_stall",
    "semantic_mismatch",
    "unwaited_async",
    "group_order_risk",
    "group_creation_risk",
    "slow_rank",
    "long_operation",
    "shared_group",
    "collective_in_except",
    "uneven_inputs",
    "version_mismatch",
    "growing_memory",
)
"""The files of this folder. Of two rules of one stage the earlier runs first: a cause before its effects."""

BY_FILE: dict[str, Declared] = {name: import_module(f"{__name__}.{name}").RULES for name in ORDER}
_DECLARED = tuple(declared for rules in BY_FILE.values() for declared in rules)
RULES = tuple(rule for rule in _DECLARED if isinstance(rule, Rule))
REFINEMENTS = tuple(refinement for refinement in _DECLARED if isinstance(refinement, Refinement))
KINDS = tuple(dict.fromkeys(kind for declared in _DECLARED for kind in declared.kinds))
"""Every kind of finding, each with its heading in docs/reference/diagnose.md."""
