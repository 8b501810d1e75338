"""From the dumps of a job to the state that rules read.

A dump tells the collectives its ring still holds, which operations had not ended, and how far each group came. It does
not tell what a rank does outside operations, whether it lives, in which step it is, what its threads are, nor tags,
roots, reductions and the other end of messages that have ended: all this is unknown to the rules, not assumed. A rank
that left no dump is evidence (`JobState.lost`); one whose dump cannot be used is merely missing.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from dtprof.columns import distinct
from dtprof.diagnosis.job_state import JobState, RankState
from dtprof.diagnosis.sources.flight_recorder.dump_fields import dtype_code
from dtprof.diagnosis.sources.flight_recorder.dump_tables import NO_LABEL, ArgumentTable, Dump, UnfinishedOperation
from dtprof.errors import NotADumpError
from dtprof.formatting import list_ranks, plural
from dtprof.job.axes import is_default
from dtprof.job.group_collectives import COLLECTIVE, checksum, line_of, split_by_group
from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import ChannelEnd, LazyOperations, Operation, RankCollectives
from dtprof.job.world_size import resolve_world_size
from dtprof.records import codes
from dtprof.records.manifest import Manifest
from dtprof.records.schema import DTYPES
from dtprof.records.sites import Site
from dtprof.records.tables import Array, Group, select

STALE_NS = 3600 * 10**9
MOVING_NS = 10 * 10**9
"""Dumps written so soon after operations were seen to end, on every rank, show a job that goes on."""
SKEW_NS = 60 * 10**9
"""Largest difference assumed between clocks of hosts."""
NEEDING_ALL = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier"}
"""Collectives that complete nowhere before all members have started them."""
KNOWN_VERSION = 2
DEVICE_BACKENDS = {"nccl", "xccl", "hccl"}
"""Backends that work on a device, and whose `pg_status` counts as the entries do."""

Keys = Mapping[tuple[int, str], GroupId]
"""The group that each rank means by a name."""


def gather_dumps(
    dumps: Iterable[Dump], problems: Iterable[str], unreadable: Iterable[int], labels: ArgumentTable
) -> JobState:
    """Return what the dumps of a job, as their reader gives them, tell together; those of older attempts are left out.

    Raises:
        NotADumpError: they are of jobs with different members.
    """
    given = {dump.rank: dump for dump in dumps}
    kept, notes = _of_one_attempt(given)
    keys = _keys(kept)
    groups = _groups(kept, keys)
    members = _members(kept, keys, groups)
    missing = [rank for rank in members if rank not in kept]
    silent = [rank for rank in missing if rank in given or rank in set(unreadable)]
    backends = Counter(dump.backend for dump in kept.values() if dump.backend)
    on_device = not backends or backends.most_common(1)[0][0] in DEVICE_BACKENDS
    # Where a group has messages, its status may count those.
    mixed = {keys[rank, name] for rank, dump in kept.items() for name in dump.p2p_groups}
    reader = _Reader(
        dumps=kept,
        keys=keys,
        groups=groups,
        labels=labels,
        columns=_columns(labels),
        mixed=mixed,
        on_device=on_device,
        # Without timing (TORCH_NCCL_ENABLE_TIMING) no operation is ever seen to begin.
        tells_starts=any(pending.started for dump in kept.values() for pending in dump.pending),
    )
    blocked = any(dump.pending for dump in kept.values())
    moving = blocked and _is_moving(kept)
    moment = "operations still ended when the dumps were written: they show a moment of a job that goes on"
    if silent:
        they = "they" if len(silent) > 1 else "it"
        notes.append(f"{_dumps_of(silent)} could not be used: what {they} did is not known")
    return JobState(
        ranks={rank: reader.rank_state(rank) for rank in kept},
        world_size=resolve_world_size((), members),
        manifest=Manifest(),
        stalled=blocked and not moving,
        stopped_on_hang_ns=None,
        problems=(
            *([moment] if moving else []),
            *problems,
            *notes,
            *_version_notes(kept),
            *(text for dump in kept.values() for text in dump.problems),
        ),
        members=members,
        lost=tuple(rank for rank in missing if rank not in silent),
        sources=("flight_recorder",),
        evidence_name="dump",
        how_to_complete=f"give {_dumps_of(missing)} too, or take the stacks of all ranks while it hangs (py-spy dump)"
        if missing
        else "",
    )


@dataclass(frozen=True, kw_only=True)
class _Reader:
    """Turns the dump of each rank into its evidence, beside the dumps of the others."""

    dumps: dict[int, Dump]
    keys: Keys
    groups: dict[GroupId, Group]
    labels: ArgumentTable
    columns: Array  # by label
    mixed: set[GroupId]
    on_device: bool
    tells_starts: bool

    def rank_state(self, rank: int) -> RankState:
        dump = self.dumps[rank]
        keys = [self.keys[rank, name] for name in dump.issued]
        pending = {entry.row: entry for entry in dump.pending}
        first_row = 0 if dump.whole else 1  # of a ring that has lost its beginning nobody knows how many came before
        channels, nth = self._channels(rank)

        def operation(row: int) -> Operation:
            return self._operation(rank, keys, row, pending.get(row), nth.get(row, -1))

        return RankState(
            rank=rank,
            attempt=0,
            pid=0,
            host="",
            call_sites=self._call_sites(dump),
            operations=LazyOperations(operation, first=0, end=len(dump.rows)),
            first_row=first_row,
            open_operations=tuple(operation(row) for row in sorted(pending)),
            counts=self._counts(rank),
            groups={key: self.groups[key] for key in (self.keys[rank, name] for name in _names(dump))},
            last_ns=dump.newest_ns,
            last_site=dump.last_site,
            steps=None,
            channels=channels,
            sees_program=False,
            collectives=RankCollectives(
                groups=self._collectives(dump, keys, pending, first_row),
                operation=lambda row: operation(row - first_row),
            ),
        )

    def _call_sites(self, dump: Dump) -> tuple[Site, ...]:
        labels = distinct(np.asarray(dump.rows.labels)).tolist()
        sites = (self.labels[label].site for label in labels if label != NO_LABEL)
        return tuple(site for site in sites if site is not None)

    def _operation(
        self, rank: int, keys: list[GroupId], row: int, pending: UnfinishedOperation | None, nth: int
    ) -> Operation:
        rows = self.dumps[rank].rows
        key = keys[rows.groups[row]]
        if pending is not None:
            return self._open_operation(rank, key, pending, nth)
        label = self.labels[rows.labels[row]]
        return Operation(
            group=key,
            op=label.op,
            seq=rows.seqs[row],
            p2p=False,
            numel=label.numel_in,
            dtype=dtype_code(label.dtype),
            site=label.site,
            done=True,
            issued_ns=rows.issued_ns[row],
            observed=True,
            on_device=self.on_device,
        )

    def _open_operation(self, rank: int, key: GroupId, pending: UnfinishedOperation, nth: int) -> Operation:
        label_number = self.dumps[rank].rows.labels[pending.row]
        agreed = self.labels[label_number].numel_in if label_number != NO_LABEL else pending.numel_in
        dtype = dtype_code(pending.dtype)
        width = DTYPES[dtype][1] if dtype != codes.NONE else 0
        peer = -1 if pending.peers is None else pending.peers[pending.op == "send"]
        return Operation(
            group=key,
            op=pending.op,
            seq=pending.seq,
            p2p=pending.p2p,
            peer=peer,
            numel=agreed,
            dtype=dtype,
            site=pending.site,
            inside_call=self._is_inside_call(rank, key, pending),
            done=False,
            issued_ns=pending.created_ns,
            observed=True,
            started=pending.started if self.tells_starts else None,
            on_device=self.on_device,
            nbytes=max(0, pending.numel_in) * width,
            nth=nth,
        )

    def _is_inside_call(self, rank: int, key: GroupId, pending: UnfinishedOperation) -> bool:
        """Say whether a rank was inside the call of an operation: it is the last enqueued one."""
        status = self.dumps[rank].status.get(pending.group)
        if not self.on_device or pending.p2p or status is None or key in self.mixed:
            return False
        return -1 < status[0] < pending.seq or (status[0] == -1 and pending.seq == 1)

    def _counts(self, rank: int) -> dict[tuple[GroupId, bool], int]:
        """Return the position after the newest collective of each group; of those that nothing tells, none."""
        dump = self.dumps[rank]
        newest = {self.keys[rank, name]: seq for name, seq in dump.issued.items() if seq >= 0}
        for name, (enqueued, _) in dump.status.items() if self.on_device else ():
            key = self.keys[rank, name]
            if key not in self.mixed:
                newest[key] = max(newest.get(key, -1), enqueued)
        return {(key, False): seq + 1 for key, seq in newest.items()}

    def _channels(self, rank: int) -> tuple[dict[ChannelEnd, int], dict[int, int]]:
        """Return how many messages of each channel were issued, and by row which one an open message is.

        Where one end has lost the beginning of its ring, both ends count from their first message that is open: those
        before have ended on both.
        """
        dump = self.dumps[rank]
        open_messages: dict[tuple[str, str, tuple[int, int]], list[int]] = {}
        for entry in dump.pending:
            if entry.peers is not None:
                open_messages.setdefault((entry.group, entry.op, entry.peers), []).append(entry.row)
        channels: dict[ChannelEnd, int] = {}
        nth: dict[int, int] = {}
        for (name, op, peers), count in dump.p2p_counts.items():
            key, sends = self.keys[rank, name], op == "send"
            peer = _global(key, peers[sends])
            rows = open_messages.get((name, op, peers), [])
            other = self.dumps.get(peer)
            number = count if dump.whole and other is not None and other.whole else len(rows)
            channels[ChannelEnd(key, peer, 0, sends)] = number
            nth |= {row: number - len(rows) + i for i, row in enumerate(rows)}
        return channels, nth

    def _collectives(
        self, dump: Dump, keys: list[GroupId], pending: Mapping[int, UnfinishedOperation], first_row: int
    ) -> dict[GroupId, Array]:
        groups, seqs, labels = (np.asarray(column) for column in (dump.rows.groups, dump.rows.seqs, dump.rows.labels))
        wanted = (labels != NO_LABEL) & (seqs >= 0)
        for number, name in enumerate(dump.issued):
            if name in dump.cut:
                wanted &= (groups != number) | (seqs != dump.cut[name])
        chosen = np.flatnonzero(wanted)
        chosen = chosen[np.lexsort((seqs[chosen], groups[chosen]))]
        group_ids, seq = groups[chosen], seqs[chosen]
        # Collectives issued together share a position: the first stands for all.
        new = np.ones(len(chosen), bool)
        new[1:] = (np.diff(group_ids) != 0) | (np.diff(seq) != 0)
        chosen, group_ids, seq = chosen[new], group_ids[new], seq[new]
        table = select(self.columns, labels[chosen])
        table["seq"] = seq
        table["issued_ns"] = np.asarray(dump.rows.issued_ns)[chosen]
        table["row"] = chosen + first_row
        is_open = np.flatnonzero(np.isin(chosen, list(pending)))
        table["state"][is_open] = codes.RETURNED
        for at in is_open.tolist():
            label = pending[int(chosen[at])]
            table["dtype"][at] = dtype_code(label.dtype) if label.op != "barrier" else codes.NONE
        return split_by_group(table, group_ids, dict(enumerate(keys)))


def _columns(labels: ArgumentTable) -> Array:
    """Return the columns of each label, as for a completed collective."""
    known = list(labels)
    table = np.zeros(len(known), COLLECTIVE)
    table["op"] = [checksum(label.op) for label in known]
    table["line"] = [line_of(label.site) for label in known]
    table["dtype"] = [dtype_code(label.dtype) for label in known]
    table["reduce_op"] = codes.NONE
    table["peer"] = -1
    table["numel"] = [label.numel_in for label in known]
    table["sized"] = True  # of others the label has no size
    table["state"] = codes.DONE
    return table


def _global(key: GroupId, peer: int) -> int:
    return key.ranks[peer] if peer < len(key.ranks) else peer


def _is_moving(dumps: dict[int, Dump]) -> bool:
    """Say whether operations still ended when the dumps were written."""
    ages = [dump.written_ns - dump.last_done_ns for dump in dumps.values() if dump.last_done_ns]
    return bool(ages) and all(0 <= age < MOVING_NS for age in ages)


def _groups(dumps: dict[int, Dump], keys: Keys) -> dict[GroupId, Group]:
    groups: dict[GroupId, Group] = {}
    for (rank, name), key in keys.items():
        known = dumps[rank].groups.get(name)
        if key not in groups or (known is not None and known.description):
            groups[key] = Group(
                name=name,
                description=known.description if known else "",
                size=len(key.ranks),
                ranks=key.ranks,
                backend=dumps[rank].backend or None,
            )
    return groups


def _members(dumps: dict[int, Dump], keys: Keys, groups: dict[GroupId, Group]) -> tuple[int, ...]:
    """Return the ranks of the job.

    Raises:
        NotADumpError: the default groups of dumps have different members.
    """
    worlds = {key.ranks: rank for (rank, _), key in keys.items() if _is_default(groups[key]) and key.ranks}
    if len(worlds) > 1:
        (ours, one), (theirs, other), *_ = sorted(worlds.items(), key=lambda item: item[1])
        raise NotADumpError(
            f"{dumps[one].path} is of a job of {plural(len(ours), 'rank')}, {dumps[other].path} of one of "
            f"{len(theirs)}; expected dumps of one job and one attempt. Give those only."
        )
    return tuple(sorted({rank for key in set(keys.values()) for rank in key.ranks} | set(dumps)))


def _version_notes(dumps: dict[int, Dump]) -> list[str]:
    notes = []
    versions = {dump.version for dump in dumps.values()}
    if len(versions) > 1:
        notes.append(f"the dumps are of different versions ({', '.join(sorted(versions))}): ranks ran different torch")
    newer = sorted(
        version
        for version in versions
        if (number := version.partition(".")[0]).isdecimal() and int(number) > KNOWN_VERSION
    )
    if newer:
        notes.append(
            f"the dumps are of version {newer[-1]}, newer than any known here ({KNOWN_VERSION}.x): "
            "what their fields mean may have changed"
        )
    return notes


def _is_default(group: Group) -> bool:
    return is_default(group) or (group.name == "0" and not group.description)


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
    note = f"{_dumps_of(left_out)} {why}: of an earlier attempt, and left out"
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
        for entry in dump.pending:
            positions = of_rank[rank].get(entry.group)
            if positions is not None and not entry.p2p and entry.op in NEEDING_ALL:
                positions[entry.seq] = max(positions.get(entry.seq, 0), entry.created_ns)
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


def _dumps_of(ranks: tuple[int, ...] | list[int]) -> str:
    """Return ranks' dumps in words."""
    return f"the dump{'s' if len(ranks) > 1 else ''} of {list_ranks(ranks)}"


def _names(dump: Dump) -> set[str]:
    """Return the names of all groups that a dump tells something of."""
    return {*dump.groups, *dump.issued, *dump.status}


def _keys(dumps: dict[int, Dump]) -> dict[tuple[int, str], GroupId]:
    """Return the group that each rank means by each name; where its dump does not tell the members, others may."""
    known: dict[str, set[tuple[int, ...]]] = {}
    users: dict[str, list[int]] = {}
    for rank, dump in dumps.items():
        for name in _names(dump):
            users.setdefault(name, []).append(rank)
            if name in dump.groups and dump.groups[name].ranks:
                known.setdefault(name, set()).add(dump.groups[name].ranks)
    keys: dict[tuple[int, str], GroupId] = {}
    for name, ranks in users.items():
        shared = GroupId.of(name, sorted(ranks))
        for rank in ranks:
            group = dumps[rank].groups.get(name)
            own = group.ranks if group is not None else ()
            others = [members for members in known.get(name, ()) if rank in members]
            if own:
                keys[rank, name] = GroupId.of(name, own)
            elif others:
                widest = max(others, key=len)
                keys[rank, name] = GroupId.of(name, widest)
            elif not name.startswith("unnamed "):
                keys[rank, name] = shared
            else:  # before torch 2.4 names are numbers of the process's own: not the same group elsewhere
                keys[rank, name] = GroupId.of(name, (rank,))
    return keys
