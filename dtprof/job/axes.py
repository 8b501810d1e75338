"""Axes of parallelism: the purpose of the groups of a job, the degree of each axis, and the ranks that share data.

The reader names the axis of each group, from device meshes, frameworks' labels and descriptions
(`records/axis_names.py`). What follows from the names is here, for reports, exporters and live views alike.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Protocol

from dtprof.records.axis_names import KNOWN_AXES
from dtprof.records.tables import Group

SAME_TOKENS = ("tp", "pp", "mp")
"""Axes along which ranks work on the same tokens."""
SAME_SAMPLES = (*SAME_TOKENS, "cp", "sp")
"""And those along which they work on the same sequences."""
OF_LABELS = frozenset(("tp", "pp", "cp", "sp", "ep"))
"""Axes that label the operations of frameworks."""
DEFAULT_GROUP = "default_pg"
"""Torch's description of the group of all ranks."""
DEFAULT_GROUP_WORDS = "the default group"
"""The same in sentences about its operations."""
UNDEFINED = ("", "undefined")
"""Descriptions that torch gives to groups of which the program says nothing."""


class DescribedGroup(Protocol):
    """A group as a rank, or as the summary, describes it."""

    @property
    def name(self) -> str:
        """The name that torch gives the group."""

    @property
    def description(self) -> str:
        """The axis that the program declared."""

    @property
    def axis(self) -> str | None:
        """The axis that it serves."""


def is_default(group: DescribedGroup) -> bool:
    """Say whether it is the group of all ranks, which init_process_group makes."""
    return group.description == DEFAULT_GROUP


def axis_words(axis: str) -> str:
    """Return for people an axis, or the description of groups that serve none: the group of all ranks is the world.

    What torch counted, where the program described no group, is a number: `over group 1`, not `over 1`.
    """
    return "world" if axis == DEFAULT_GROUP else f"group {axis}" if axis.isdigit() else axis


def purpose_of(group: DescribedGroup) -> str:
    """Return the purpose of a group: its axis, else the program's description; empty where neither is known.

    Unlike the name, which counts groups, this is the same in every run and on every node.
    """
    return group.axis or ("" if group.description in UNDEFINED else group.description)


def purpose_of_operation(group: DescribedGroup | None, api: str | None) -> str:
    """Return the purpose of an operation: that of its group, unless only the label of the operation names an axis.

    Frameworks send messages of a pipeline over the default group, too. Empty where nothing is known.
    """
    if api in OF_LABELS and (group is None or not is_clear(group)):
        return api or ""
    return purpose_of(group) if group is not None else ""


def name_groups(groups: Iterable[DescribedGroup]) -> dict[str, str]:
    """Return for people each group by its name: its purpose, with the name where several groups have that purpose."""
    purposes = {group.name: axis_words(purpose_of(group)) for group in groups}
    counted = Counter(purposes.values())
    return {
        name: f"{purpose} ({name})" if counted[purpose] > 1 else purpose
        for name, purpose in purposes.items()
        if purpose
    }


def is_clear(group: DescribedGroup) -> bool:
    """Say whether the axis of a group determines the data that its ranks share."""
    return group.axis in KNOWN_AXES


def axis_sizes(groups: Iterable[tuple[str | None, int]]) -> dict[str, int]:
    """Return the size of each axis, by name: that of the largest group along it, given axis and size of groups."""
    sizes: dict[str, int] = {}
    for axis, size in groups:
        if axis:
            sizes[axis] = max(sizes.get(axis, 0), size)
    return dict(sorted(sizes.items()))


def distinct_groups(groups: Iterable[Group]) -> Collection[Group]:
    """Return each group once, of all that ranks describe."""
    return {(group.name, group.ranks): group for group in groups}.values()


def find_replicas(ranks: Iterable[int], groups: Iterable[Group], axes: Collection[str]) -> list[list[int]]:
    """Return the ranks that groups along these axes join, directly or through others; most often each is alone."""
    root = {rank: rank for rank in ranks}

    def find(rank: int) -> int:
        while root[rank] != rank:
            root[rank] = rank = root[root[rank]]
        return rank

    for members in {group.ranks for group in groups if group.axis in axes}:
        present = [find(rank) for rank in members if rank in root]
        for rank in present:
            root[rank] = present[0]
    replicas: dict[int, list[int]] = {}
    for rank in sorted(root):
        replicas.setdefault(find(rank), []).append(rank)
    return list(replicas.values())
