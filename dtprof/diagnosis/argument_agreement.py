"""What the members of a collective must agree on, and in which of it they do not."""

from dtprof.diagnosis.job_state import Operation
from dtprof.records.codes import NONE

SIZES_AGREE = ("all_reduce", "broadcast", "reduce", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
SPLIT = "all_to_all"


def disagreement(present: dict[int, Operation]) -> str | None:
    """Return the kind of mismatch of the operations at one position, None where they agree."""
    operations = list(present.values())
    op = operations[0].op
    if len({o.op for o in operations}) > 1:
        return "collective-order-mismatch"
    if op in ROOTED and len({o.peer for o in operations}) > 1:
        return "root-mismatch"
    if op != "barrier" and len({o.dtype for o in operations} - {NONE}) > 1:
        return "dtype-mismatch"
    if op in REDUCING and len({o.reduce_op for o in operations} - {NONE}) > 1:
        return "reduce-op-mismatch"
    sizes = {o.numel for o in operations if o.numel >= 0}  # of some it may not be known
    if (op in SIZES_AGREE or all(o.even_sizes for o in operations)) and len(sizes) > 1:
        return "size-mismatch"
    if op == SPLIT and bad_pairs(present):
        return "split-size-mismatch"
    return None


def bad_pairs(present: dict[int, Operation]) -> list[tuple[int, int, int, int]]:
    """Return (sender, receiver, elements sent, elements expected) of an all_to_all where these differ."""
    ranks = next(iter(present.values())).group.ranks
    pairs = []
    if all(o.sizes is None for o in present.values()):
        sent = {rank: o.numel for rank, o in present.items()}
        a = min(sent)
        pairs = [(a, b, sent[a] // len(ranks), sent[b] // len(ranks)) for b in sent if sent[b] != sent[a]]
    else:
        for a, mine in present.items():
            for b, theirs in present.items():
                given = _share(mine, ranks.index(b), len(ranks), incoming=False)
                wanted = _share(theirs, ranks.index(a), len(ranks), incoming=True)
                if given is not None and wanted is not None and given != wanted:
                    pairs.append((a, b, given, wanted))
    return pairs


def _share(operation: Operation, place: int, size: int, *, incoming: bool) -> int | None:
    if operation.sizes is None:
        return operation.numel // size
    sizes = operation.sizes[1 if incoming else 0]
    return sizes[place] if len(sizes) == size else None
