"""Stacks of all ranks as JSON, schema 1."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from dtprof.diagnosis.stack_groups import RankStack, group_stacks

SCHEMA = 1


def stacks_json(stacks: Sequence[RankStack], *, taken: str, t_ns: int | None, notes: Sequence[str]) -> dict[str, Any]:
    """Return the document that `dtprof stacks --json` prints; frames innermost first."""
    return {
        "schema": SCHEMA,
        "taken": taken,
        "t_ns": t_ns,
        "groups": [asdict(group) for group in group_stacks(stacks)],
        "ranks": [asdict(stack) for stack in stacks],
        "cannot_tell": list(notes),
    }
