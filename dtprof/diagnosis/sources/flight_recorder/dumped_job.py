"""The dumps of a job side by side: who is in which group, how far each rank came in it, and what does not fit."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from dtprof.diagnosis.findings import rank_list
from dtprof.diagnosis.sources.flight_recorder.dump_tables import Dump, Labels, Pending, Track
from dtprof.errors import NotADumpError
from dtprof.job.groups import GroupId
from dtprof.records.tables import Group, Site

STALE_NS = 3600 * 10**9
MOVING_NS = 10 * 10**9
"""Dumps written so soon after operations were seen to end, on every rank, show a job that goes on."""
SKEW_NS = 60 * 10**9
"""What clocks of hosts may differ by."""
NEEDING_ALL = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}
"""Collectives that end nowhere before all members have begun them."""
KNOWN_VERSION = 2
COUNTING_BACKENDS = {"nccl", "xccl", "hccl"}
"""Back ends whose `pg_status` counts as the entries do."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the rules look at."""

    dumps: dict[int, Dump]
    labels: Labels
    world: tuple[int, ...]
    silent: tuple[int, ...]  # ranks whose dump cannot be read, or is of another attempt: nothing is known of them
    keys: dict[tuple[int, str], GroupId]
    mixed: frozenset[GroupId]  # groups whose status may count point-to-point operations
    counting: bool
    problems: tuple[str, ...] = ()
    _groups: dict[GroupId, Group] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks of the job without a dump."""
        return tuple(rank for rank in self.world if rank not in self.dumps)

    @property
    def moving(self) -> bool:
        """Say whether operations still ended when the dumps were written."""
        ages = [dump.written_ns - dump.last_done_ns for dump in self.dumps.values() if dump.last_done_ns]
        return bool(ages) and all(0 <= age < MOVING_NS for age in ages)

    def key(self, rank: int, name: str) -> GroupId:
        """Return the group that a rank means by a name."""
        return self.keys[rank, name]

    def group(self, key: GroupId) -> Group:
        """Return the group as users know it."""
        return self._groups[key]

    def of(self, rank: int) -> tuple[Pending, ...]:
        """Return what had not ended on a rank."""
        return self.dumps[rank].pending if rank in self.dumps else ()

    def track(self, rank: int, key: GroupId) -> Track | None:
        """Return the collectives of a group that a rank's dump holds."""
        dump = self.dumps.get(rank)
        return dump.tracks.get(key.name) if dump is not None and self.keys.get((rank, key.name)) == key else None

    def issued(self, rank: int, key: GroupId) -> int | None:
        """Return the newest collective a rank issued in a group, None where its dump does not tell."""
        dump = self.dumps.get(rank)
        if dump is None or self.keys.get((rank, key.name)) != key:
            return None
        told = [dump.issued[key.name]] if key.name in dump.issued else []
        if self.counting and key not in self.mixed and key.name in dump.status:
            told.append(dump.status[key.name][0])
        return max(told, default=None)

    def inside_call(self, rank: int, pending: Pending) -> bool:
        """Say whether a rank had begun to issue an operation and not returned: it is enqueued last."""
        key = self.key(rank, pending.group)
        status = self.dumps[rank].status.get(pending.group)
        if not self.counting or pending.p2p or status is None or key in self.mixed:
            return False
        return -1 < status[0] < pending.seq or (status[0] == -1 and pending.seq == 1)


def assemble(dumps: Iterable[Dump], labels: Labels, *, unreadable: Iterable[int], problems: Iterable[str]) -> Job:
    """Put dumps together, leaving out those of an older attempt.

    Raises:
        NotADumpError: they are of jobs with different members.
    """
    given = {dump.rank: dump for dump in dumps}
    kept, notes = _of_one_attempt(given)
    keys = _keys(kept)
    groups: dict[GroupId, Group] = {}
    for (rank, name), key in keys.items():
        told = kept[rank].groups.get(name)
        if key not in groups or (told is not None and told.description):
            groups[key] = Group(
                name=name, description=told.description if told else "", size=len(key.ranks), ranks=key.ranks
            )
    worlds = {key.ranks: rank for (rank, _), key in keys.items() if _is_default(groups[key]) and key.ranks}
    if len(worlds) > 1:
        (ours, one), (theirs, other), *_ = sorted(worlds.items(), key=lambda item: item[1])
        raise NotADumpError(
            f"{kept[one].path} is of a job of {len(ours)} ranks, {kept[other].path} of one of {len(theirs)}; "
            "expected dumps of one job and one attempt. Give those only."
        )
    default = max((key.ranks for key in keys.values() if _is_default(groups[key])), key=len, default=())
    named = {rank for key in keys.values() for rank in key.ranks} | set(default) | set(kept)
    backends = Counter(dump.backend for dump in kept.values() if dump.backend)
    backend = backends.most_common(1)[0][0] if backends else ""
    versions = {dump.version for dump in kept.values()}
    if len(versions) > 1:
        notes.append(f"the dumps are of different versions ({', '.join(sorted(versions))}): ranks ran different torch")
    newer = sorted(
        one for one in versions if (number := one.partition(".")[0]).isdecimal() and int(number) > KNOWN_VERSION
    )
    if newer:
        notes.append(
            f"the dumps are of version {newer[-1]}, newer than any known here ({KNOWN_VERSION}.x): "
            "what their fields mean may have changed"
        )
    return Job(
        dumps=kept,
        labels=labels,
        world=tuple(sorted(named)),
        silent=tuple(sorted((set(given) - set(kept)) | (set(unreadable) - set(kept)))),
        keys=keys,
        mixed=frozenset(keys[rank, name] for rank, dump in kept.items() for name in dump.p2p_groups),
        counting=backend in COUNTING_BACKENDS or not backend,
        problems=(*problems, *notes, *(text for dump in kept.values() for text in dump.problems)),
        _groups=groups,
    )


def _is_default(group: Group) -> bool:
    return group.description == "default_pg" or (group.name == "0" and not group.description)


def _of_one_attempt(dumps: dict[int, Dump]) -> tuple[dict[int, Dump], list[str]]:
    newest = max((dump.newest_ns for dump in dumps.values()), default=0)
    timeout_ms = max((p.timeout_ms for dump in dumps.values() for p in dump.pending), default=0)
    allowed = max(STALE_NS, 3 * timeout_ms * 1_000_000)
    stale = [rank for rank, dump in dumps.items() if dump.newest_ns and newest - dump.newest_ns > allowed]
    earlier = _ended_before_others_began({rank: dump for rank, dump in dumps.items() if rank not in stale})
    left_out = sorted(stale + earlier)
    if not left_out:
        return dumps, []
    end = "ends" if len(left_out) == 1 else "end"
    why = (
        f"{end} more than {allowed // STALE_NS} h before the others"
        if stale
        else f"{end} with collectives that others began only later"
    )
    note = f"{dumps_of(left_out)} {why}: of an earlier attempt, and left out"
    return {rank: dump for rank, dump in dumps.items() if rank not in left_out}, [note]


def _ended_before_others_began(dumps: dict[int, Dump]) -> list[int]:
    """Return ranks that had come through a collective of all its members long before another one began it."""
    begun: dict[GroupId, dict[int, int]] = {}  # by position: when the last member began
    of_rank = {
        rank: {
            name: begun.setdefault(GroupId.of(name, group.ranks), {})
            for name, group in dump.groups.items()
            if name in dump.issued and rank in group.ranks
        }
        for rank, dump in dumps.items()
    }
    for rank, dump in dumps.items():
        for one in dump.pending:
            positions = of_rank[rank].get(one.group)
            if positions is not None and not one.p2p and one.op in NEEDING_ALL:
                positions[one.seq] = max(positions.get(one.seq, 0), one.created_ns)
    found = []
    for rank, dump in dumps.items():
        waiting = {one.group: one.seq for one in reversed(dump.pending) if not one.p2p}
        for name, positions in of_rank[rank].items():
            through = min(dump.issued[name], waiting.get(name, dump.issued[name] + 1) - 1)
            began = max((began for seq, began in positions.items() if seq <= through), default=0)
            if dump.newest_ns and began - dump.newest_ns > SKEW_NS:
                found.append(rank)
                break
    return found


def dumps_of(ranks: tuple[int, ...] | list[int]) -> str:
    """Return ranks' dumps in words."""
    return f"the dump{'s' if len(ranks) > 1 else ''} of {rank_list(ranks)}"


def _keys(dumps: dict[int, Dump]) -> dict[tuple[int, str], GroupId]:
    """Return the group that each rank means by each name; where its dump does not tell the members, others may."""
    known: dict[str, set[tuple[int, ...]]] = {}
    users: dict[str, list[int]] = {}
    for rank, dump in dumps.items():
        for name in {*dump.groups, *dump.issued, *dump.status}:
            users.setdefault(name, []).append(rank)
            if name in dump.groups and dump.groups[name].ranks:
                known.setdefault(name, set()).add(dump.groups[name].ranks)
    keys: dict[tuple[int, str], GroupId] = {}
    for name, ranks in users.items():
        shared = GroupId.of(name, tuple(sorted(ranks)))
        for rank in ranks:
            group = dumps[rank].groups.get(name)
            own = group.ranks if group is not None else ()
            others = sorted((members for members in known.get(name, ()) if rank in members), key=len, reverse=True)
            if own:
                keys[rank, name] = GroupId.of(name, own)
            elif others:
                keys[rank, name] = GroupId.of(name, others[0])
            elif not name.startswith("unnamed "):
                keys[rank, name] = shared
            else:  # before torch 2.4 names are numbers of the process's own: not the same group elsewhere
                keys[rank, name] = GroupId.of(name, (rank,))
    return keys


def sites(pending: dict[int, Pending]) -> dict[int, Site]:
    """Return the lines of operations."""
    return {rank: one.site for rank, one in pending.items() if one.site is not None}
