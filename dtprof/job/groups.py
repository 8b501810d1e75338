"""Identities of process groups and of their P2P channels: the same for all ranks that know them.

Ranks number their groups by themselves; what they agree on is the name, the members and how often a group of that name
and these members was made before. No other module identifies groups.
"""

from collections.abc import Container, Iterable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dtprof.records import codes
from dtprof.records.rank_log.group_members import Members, share
from dtprof.records.tables import Array, Group


class GroupId(NamedTuple):
    """A process group across ranks; one that is created again under the same name is a new instance.

    Members are shared objects whose hash is kept: a thousand ranks look the same groups up again and again.
    """

    name: str
    ranks: Members  # global ranks by rank in the group; empty where not known
    size: int
    instance: int = 0  # groups of the same name and members created before

    @classmethod
    def of(cls, name: str, ranks: Iterable[int], *, size: int = 0, instance: int = 0) -> "GroupId":
        """Identify a group; `size` counts where its members are not known."""
        members = ranks if isinstance(ranks, Members) else share(ranks)
        return cls(name, members, len(members) or size, instance)


UNKNOWN_GROUP = GroupId.of("?", ())
"""The group of operations whose group was lost from the records."""


class Channel(NamedTuple):
    """Operations that are numbered together: the collectives of a group, or its messages from one member to another."""

    group: GroupId
    sender: int = -1  # rank in the group; -1 for collectives
    receiver: int = -1

    @property
    def is_p2p(self) -> bool:
        """Say whether it carries messages."""
        return self.sender >= 0

    @property
    def num_members(self) -> int:
        """Return how many ranks take part in each operation."""
        return 2 if self.is_p2p else self.group.size

    @property
    def members(self) -> Iterable[int]:
        """Return the global ranks that take part in each operation."""
        ranks = self.group.ranks
        return (ranks[self.sender], ranks[self.receiver]) if self.is_p2p else ranks

    @property
    def sending_rank(self) -> int:
        """Return the global rank of the sender of messages."""
        return self.group.ranks[self.sender]


def identify_groups(groups: Mapping[int, Group], chosen: Container[int] | None = None) -> dict[int, GroupId]:
    """Identify the (chosen) groups of one rank, by their numbers in its records.

    Every rank creates the groups it is in in the same order: instances are counted over all, chosen or not.
    """
    identities: dict[int, GroupId] = {}
    created: dict[tuple[str, Members], int] = {}
    for number in sorted(groups):
        group = groups[number]
        ranks = group.ranks if isinstance(group.ranks, Members) else share(group.ranks)
        instance = created.get((group.name, ranks), 0)
        created[group.name, ranks] = instance + 1
        if chosen is None or number in chosen:
            identities[number] = GroupId.of(group.name, ranks, size=group.size, instance=instance)
    return identities


def message_tags(messages: Array, groups: Mapping[int, Group]) -> npt.NDArray[np.int64]:
    """Return the tag by which each message of a rank is matched: 0 where the backend ignores tags.

    Parameters:
        messages: rows of its operations.
        groups: its groups, by their numbers in its records.
    """
    tags: npt.NDArray[np.int64] = messages["tag"].astype(np.int64) & 0x7FFFFFFF
    ignoring = [number for number, group in groups.items() if group.is_nccl]
    if ignoring:
        on_device = (messages["flags"] & codes.DEVICE) != 0
        tags[on_device & np.isin(messages["group"], ignoring)] = 0
    return tags
