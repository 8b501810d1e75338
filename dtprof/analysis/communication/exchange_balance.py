"""How evenly the members of a group share its exchanges: in an all_to_all each sends and receives what its splits say.

Experts on several ranks are the common case: the exchange to the experts brings each rank as many tokens as its experts
were given, and the exchange back sends them. One side of each is even, that of the tokens' own ranks; the other one is
the load of the experts. The busiest member decides when an exchange, and the work between two of them, is over.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from dtprof.analysis.map_reduce.placed_ranks import PlacedBatch
from dtprof.analysis.results import ExchangeBalance, ExchangeMember, GroupResult
from dtprof.columns import distinct
from dtprof.intervals import Column, Mask
from dtprof.job.group_collectives import SPLIT, find_common
from dtprof.job.groups import GroupId
from dtprof.records.tables import Array, RankTables, ids_named, select

MAX_EXCHANGES = 1024
"""Exchanges of a group that are compared, the newest."""
EXCHANGE = np.dtype([("seq", "i8"), ("step", "i8"), ("sent", "i8"), ("received", "i8"), ("uneven", "?")])
"""An exchange of one member: its position, its measured step, bytes sent and received, its own part among them."""


def find_exchanges(batch: PlacedBatch, *, step: Column, chosen: Mask) -> list[dict[GroupId, Array]]:
    """Return the newest exchanges of each rank whose sizes are known, by group, with the `step` of each operation."""
    found: list[dict[GroupId, Array]] = []
    for one, begin, end in zip(batch.ranks, batch.bounds, batch.bounds[1:], strict=False):
        tables, operations, matched = one.placed.tables, one.placed.operations, one.placed.matched
        is_exchange = ids_named(tables.ops, (SPLIT,))[operations["op"]] & chosen[begin:end]
        own: dict[GroupId, Array] = {}
        found.append(own)
        if not is_exchange.any():
            continue
        for channel, rows, seqs in zip(matched.channels, matched.rows, matched.seqs, strict=True):
            kept = np.flatnonzero(is_exchange[rows])[-MAX_EXCHANGES:] if not channel.is_p2p else ()
            if len(kept) and channel.group.size > 1:
                table = _measure(operations[rows[kept]], tables)
                table["seq"], table["step"] = seqs[kept], step[begin:end][rows[kept]]
                own[channel.group] = select(table, table["sent"] >= 0)
    return found


def _measure(rows: Array, tables: RankTables) -> Array:
    """Return the bytes of exchanges of one rank, -1 where its splits were not recorded."""
    table = np.zeros(len(rows), EXCHANGE)
    for i, (tag, nbytes) in enumerate(zip(rows["tag"].tolist(), rows["nbytes"].tolist(), strict=True)):
        splits = tables.sizes.get(tag)
        if splits is None:
            table[["sent", "received"]][i] = (nbytes, nbytes) if tag == 0 else (-1, -1)
            continue
        # Splits count rows of a tensor; the size is that of all sent, or of all received by who sends nothing.
        sent, received = map(sum, splits)
        width = nbytes / (sent or received or 1)
        table[["sent", "received", "uneven"]][i] = round(sent * width), round(received * width), True
    return table


def join_exchanges(parts: Iterable[Mapping[GroupId, Array]]) -> dict[GroupId, Array]:
    """Return the newest exchanges of one rank, given those of several stretches of a run."""
    tables: dict[GroupId, list[Array]] = defaultdict(list)
    for part in parts:
        for group, table in part.items():
            tables[group].append(table)
    return {group: np.concatenate(some)[-MAX_EXCHANGES:] for group, some in tables.items()}


def measure_balance(
    exchanges: Mapping[int, Mapping[GroupId, Array]], groups: Sequence[GroupResult]
) -> tuple[ExchangeBalance, ...]:
    """Return the balance of each group with uneven exchanges that all members recorded, the most uneven first.

    Parameters:
        exchanges: of each rank.
        groups: of the job, which know the axes.
    """
    by_group: dict[GroupId, dict[int, Array]] = defaultdict(dict)
    for rank, own in exchanges.items():
        for group, table in own.items():
            by_group[group][rank] = table
    axes = {(group.name, group.ranks): group.axis for group in groups}
    found = []
    for group, tables in by_group.items():
        ranks = sorted(tables)
        if len(ranks) < group.size or not any(table["uneven"].any() for table in tables.values()):
            continue
        places = find_common([tables[rank]["seq"] for rank in ranks])
        if len(places[0]):
            common = [select(tables[rank], at) for rank, at in zip(ranks, places, strict=True)]
            found.append(_balance(group.name, axes.get((group.name, tuple(group.ranks))), ranks, common))
    return tuple(sorted(found, key=lambda one: (-one.imbalance, one.group)))


def _balance(name: str, axis: str | None, ranks: Sequence[int], common: Sequence[Array]) -> ExchangeBalance:
    """Return the balance of exchanges that all members have, a table each."""
    sent, received = (np.stack([table[side] for table in common]) for side in ("sent", "received"))
    load = np.where(received.max(axis=0) >= sent.max(axis=0), received, sent)  # both sides sum up to the same
    total = load.sum()
    busiest = int(np.argmax(load.sum(axis=1)))
    steps = max(1, len(distinct(common[0]["step"])))
    return ExchangeBalance(
        group=name,
        axis=axis,
        count=load.shape[1],
        imbalance=float(load.max(axis=0).sum() * len(ranks) / total) if total else 1.0,
        busiest_rank=ranks[busiest],
        busiest_share=float(load[busiest].sum() / total) if total else 1 / len(ranks),
        members=tuple(
            ExchangeMember(
                rank=rank,
                sent_bytes_per_step=int(sent[i].sum()) // steps,
                received_bytes_per_step=int(received[i].sum()) // steps,
                load=float(load[i].sum() * len(ranks) / total) if total else 1.0,
            )
            for i, rank in enumerate(ranks)
        ),
    )
