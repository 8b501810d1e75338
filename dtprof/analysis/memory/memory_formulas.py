"""Memory of a rank beside the formula for its sharding scheme, and the assumptions of the formula.

Model state: ZeRO (Rajbhandari et al. 2020) with Adam. Activations of transformer layers: Korthikanti et al. 2022. How
the model is sharded and the sizes of its layers come from operations only: labels of frameworks, members, sizes, types.
"""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from dtprof.analysis.pipeline.bubbles import RankPipeline
from dtprof.analysis.pipeline.schedule_replay import BACKWARD, BACKWARD_WEIGHT, FORWARD
from dtprof.analysis.results import Assumption, Headroom, MemoryFormula
from dtprof.intervals import Column
from dtprof.records import events
from dtprof.records.sites import Label, Site
from dtprof.records.tables import Array, NodeMemory, RankTables, Sharding

SCHEMES = ("none", "zero1", "zero2", "zero3")
"""How the model's state is sharded over data-parallel ranks."""
TABLES = "tables"
"""Sharding of embedding tables alone: each lies whole, or in parts, on ranks of its own."""
MIXED_FROM = 5
"""Optimizer state over parameters: 2 are the two moments of Adam, 6 those and a copy, in 32 bits, of 16-bit values."""
TOLERANCE = 0.05
LEAST_GATHERS = 1.5
"""Gatherings of a part of FSDP for each reduction from which it is gathered anew for the backward pass."""
LAYER = re.compile(r"((?:.*?\.)?)(\d+)(?:\.|$)")


@dataclass(frozen=True, kw_only=True)
class ModelShare:
    """A rank's share of the model, as its operations show it."""

    scheme: str = "none"
    is_known: bool = False  # from a framework that shards or replicates the model
    shards: int = 1  # ranks that the state is sharded over, or could be
    is_of_several: bool = False  # models of this rank, sharded differently: no formula is that of their sum
    holds_whole: bool = False  # zero2: of parameters, all between steps; FSDP holds its shard
    layers: int | None = None  # on this rank, of which `in_flight` microbatches are held
    crossing_values: int | None = None  # batch * sequence * hidden: what crosses tensor-parallel layers
    value_bytes: int = 2
    tensor_ranks: int = 1
    is_sequence_parallel: bool = False
    in_flight: float = 1.0  # microbatches of which all its layers keep activations
    recomputes: bool = False


@dataclass(kw_only=True)
class LabelledOperations:
    """The labelled operations of one rank: of each call site its label, the first operation, and how many there are."""

    sites: list[tuple[Site, Array, int]] = field(default_factory=list)
    num_operations: int = 0  # labelled or not

    def add(self, others: "LabelledOperations") -> None:
        """Take in later ones."""
        counts = Counter[Site]()
        first: dict[Site, Array] = {}
        for site, row, count in (*self.sites, *others.sites):
            first.setdefault(site, row)
            counts[site] += count
        self.sites = [(site, row, counts[site]) for site, row in first.items()]
        self.num_operations += others.num_operations


def list_labelled(tables: RankTables, operations: Array) -> LabelledOperations:
    """Return the operations of one rank that carry a label."""
    labelled = {number: site for number, site in tables.sites.items() if site.label is not None}
    return LabelledOperations(sites=_label_operations(operations, labelled), num_operations=len(operations))


def find_share(tables: RankTables, labelled: LabelledOperations, pipeline: RankPipeline | None) -> ModelShare:
    """Return the share of the model that a rank holds, as its operations show it."""
    labels = [site.label for site, _, _ in labelled.sites if site.label is not None]
    rows, counts = [row for _, row, _ in labelled.sites], [count for _, _, count in labelled.sites]
    share = _find_scheme(tables, labelled.num_operations, labels, rows, counts)
    layers = {(match[1], match[2]) for label in labels if (match := LAYER.match(label.module))}
    share = replace(
        share,
        layers=len(layers) or None,
        in_flight=_most_in_flight(pipeline) if pipeline is not None else 1.0,
        recomputes=events.RECOMPUTE in tables.ops,
    )
    crossing = [
        (int(row["nbytes"]), row)
        for label, row in zip(labels, rows, strict=True)
        if label.api == "tp" and label.text.startswith("tp output of ") and LAYER.match(label.module)
    ]
    if not crossing:
        return share
    nbytes, row = max(crossing, key=lambda item: item[0])
    if nbytes <= 0 or row["numel"] <= 0:
        return share
    return replace(
        share,
        crossing_values=int(row["numel"]),
        value_bytes=nbytes // int(row["numel"]),
        tensor_ranks=_size_of(tables, row),
        is_sequence_parallel=tables.ops[int(row["op"])] == "reduce_scatter",
    )


def _label_operations(operations: Array, labelled: Mapping[int, Site]) -> list[tuple[Site, Array, int]]:
    """Return the labelled sites that occur, and of each the first operation and how many there are."""
    ids = np.array(sorted(labelled), np.int64)
    if not len(ids) or not len(operations):
        return []
    sites = operations["site"].astype(np.int64)
    place = np.minimum(np.searchsorted(ids, sites), len(ids) - 1)
    known = np.flatnonzero(ids[place] == sites)
    counts = np.bincount(place[known], minlength=len(ids))
    first = np.zeros(len(ids), np.int64)
    first[place[known][::-1]] = known[::-1]
    # Copies: a view of a row keeps its whole table.
    return [
        (labelled[int(ids[i])], operations[first[i]].copy(), int(counts[i])) for i in np.flatnonzero(counts).tolist()
    ]


def _find_scheme(
    tables: RankTables, num_operations: int, labels: Sequence[Label], rows: Sequence[Array], counts: Sequence[int]
) -> ModelShare:
    if any(sharding.scheme == TABLES for sharding in tables.shardings):
        return ModelShare(is_known=True, is_of_several=True)
    declared = [sharding for sharding in tables.shardings if sharding.scheme in SCHEMES]
    replicates = any(label.api == "ddp" for label in labels)
    if declared:  # of OSS within ShardedDataParallel the latter, which shards more
        most = max(declared, key=lambda sharding: SCHEMES.index(sharding.scheme))
        is_whole = most.scheme != "zero3"
        return ModelShare(
            scheme=most.scheme,
            is_known=True,
            shards=max(1, most.shards),
            # DDP reduces the gradients of a model whose optimizer's state is sharded, but none that are sharded.
            is_of_several=(replicates and most.scheme in ("zero2", "zero3")) or _differ(declared),
            holds_whole=is_whole,
        )
    gathers, scatters, shards = 0, 0, 0
    for label, row, count in zip(labels, rows, counts, strict=True):
        if label.api == "fsdp" and "all-gather of" in label.text:
            gathers, shards = gathers + count, max(shards, _size_of(tables, row))
        elif label.api == "fsdp" and "reduce-scatter of" in label.text:
            scatters += count
    if gathers:
        again = gathers >= LEAST_GATHERS * scatters
        return ModelShare(scheme="zero3" if again else "zero2", is_known=True, shards=shards, is_of_several=replicates)
    for label, row in zip(labels, rows, strict=True):
        if label.api == "zero" and "broadcast" in label.text:
            return ModelShare(scheme="zero1", is_known=True, shards=_size_of(tables, row))
    for label, row in zip(labels, rows, strict=True):
        if label.api == "ddp":
            return ModelShare(is_known=True, shards=_size_of(tables, row))
    sizes = [group.size for group in tables.groups.values() if (group.axis or "").startswith("dp")]
    return ModelShare(is_known=not num_operations, shards=max(sizes, default=1))


def _differ(declared: Sequence[Sharding]) -> bool:
    """Say whether parameters are sharded differently: experts over fewer ranks than the rest, or several models."""
    schemes = {sharding.scheme for sharding in declared}
    return len({sharding.shards for sharding in declared}) > 1 or (len(schemes) > 1 and schemes != {"zero1", "zero2"})


def _size_of(tables: RankTables, row: Array) -> int:
    group = tables.groups.get(int(row["group"]))
    return max(1, group.size) if group is not None else 1


def _most_in_flight(pipeline: RankPipeline) -> float:
    """Return the most microbatches that all stages of a rank together hold activations of, in layers of the rank."""
    steps, kinds = pipeline.actions["step"], pipeline.actions["kind"]
    of_last = steps == steps[-1]
    begins = pipeline.actions["begin"][of_last & (kinds == FORWARD)]
    ends = pipeline.actions["end"][of_last & ((kinds == BACKWARD) | (kinds == BACKWARD_WEIGHT))]
    change = np.repeat([-1, 1], [len(ends), len(begins)])
    held = change[np.concatenate([ends, begins]).argsort(kind="stable")].cumsum()
    return max(1, int(held.max(initial=0))) / max(1, len(pipeline.pipeline.stages))


def state_by_scheme(parameter_bytes: int, shards: int, *, is_mixed: bool) -> dict[str, int]:
    """Return the bytes of Adam's state for parameters of so many bytes in total, on each of so many ranks.

    In units of the parameters: 1 parameters, 1 gradients, 2 moments; 6 moments and copy where those have 32 bits of 16.
    """
    state = 6 if is_mixed else 2
    whole = {"none": 2 + state, "zero1": 2, "zero2": 1, "zero3": 0}
    return {name: round(parameter_bytes * (kept + (2 + state - kept) / max(1, shards))) for name, kept in whole.items()}


def layer_activation_factor(
    tensor_ranks: Column, *, is_sequence_parallel: bool, recomputes: bool
) -> npt.NDArray[np.float64]:
    """Return the bytes that a layer keeps for each value that crosses it, of 16 bits, without scores of attention."""
    if recomputes:
        return 2 / tensor_ranks if is_sequence_parallel else np.full(np.shape(tensor_ranks), 2.0)
    factor: npt.NDArray[np.float64] = 34 / tensor_ranks if is_sequence_parallel else 10 + 24 / tensor_ranks
    return factor


def activation_bytes(share: ModelShare) -> int | None:
    """Return the activations that the layers of a rank keep by formula; None where their sizes are not known.

    For 16-bit values, of a layer: sbh(10 + 24/t), with sequence parallelism sbh * 34/t, recomputed 2sbh; for wider
    values as much more. Scores of the attention (5as/h) are left out: fused kernels keep none.
    """
    if share.layers is None or share.crossing_values is None:
        return None
    t = share.tensor_ranks
    factor = float(
        layer_activation_factor(
            np.array(t), is_sequence_parallel=share.is_sequence_parallel, recomputes=share.recomputes
        )
    )
    return round(share.crossing_values * factor * share.value_bytes / 2 * share.layers * share.in_flight)


def compare_with_formula(held: Mapping[str, int | None], share: ModelShare) -> MemoryFormula | None:
    """Return the memory of a rank beside the formulas; None where its parameters or their sharding are not known."""
    parameters = held.get("parameters")
    if not parameters or share.is_of_several:
        return None
    is_shard = share.scheme in ("zero2", "zero3") and not share.holds_whole
    whole = parameters * (share.shards if is_shard else 1)
    by_scheme = state_by_scheme(whole, share.shards, is_mixed=_is_mixed(held, share))
    counted = (
        "parameters",
        "gradients",
        "optimizer_state",
        *(["communication"] if share.scheme == "zero2" and is_shard else []),
    )
    counted_bytes = [held.get(name) for name in counted]
    return MemoryFormula(
        scheme=share.scheme,
        shards=share.shards,
        state_bytes=None if None in counted_bytes else sum(filter(None, counted_bytes)),
        state_formula_bytes=by_scheme[share.scheme],
        by_scheme_bytes=by_scheme,
        activation_bytes=held.get("activations"),
        activation_formula_bytes=activation_bytes(share),
    )


def _optimizer_ratio(held: Mapping[str, int | None], share: ModelShare) -> float | None:
    """Return the optimizer's state over the parameters that it is of."""
    parameters, state = held.get("parameters"), held.get("optimizer_state")
    if not parameters or state is None:
        return None
    return state / parameters * (share.shards if share.scheme == "zero1" or share.holds_whole else 1)


def _is_mixed(held: Mapping[str, int | None], share: ModelShare) -> bool:
    ratio = _optimizer_ratio(held, share)
    return ratio is not None and ratio >= MIXED_FROM


def list_assumptions(ranks: Sequence[tuple[Mapping[str, int | None], ModelShare]]) -> tuple[Assumption, ...]:
    """Return the assumptions of the formulas, and whether each holds in this run."""
    known = [(held, share) for held, share in ranks if held.get("parameters") and not share.is_of_several]
    if not known:
        return ()
    shares = [share for _, share in known]
    ratios = [ratio for held, share in known if (ratio := _optimizer_ratio(held, share)) is not None]
    ratio = float(np.mean(ratios)) if ratios else None
    is_mixed = ratio is not None and ratio >= MIXED_FROM
    adam = (
        "two moments and a copy of each parameter in 32 bits" if is_mixed else "two moments of each parameter, as wide"
    )
    assumptions = [
        Assumption(text=_describe_scheme(shares), holds=True if all(share.is_known for share in shares) else None),
        Assumption(text=f"Adam: {adam}", holds=_is_near(ratio, 6 if is_mixed else 2)),
        Assumption(text="gradients of all parameters, as wide", holds=_is_near(_gradient_ratio(known), 1)),
    ]
    if any(activation_bytes(share) is not None for share in shares):
        recomputed = "every layer is recomputed as a whole" if shares[0].recomputes else "no layer is recomputed"
        assumptions += [
            Assumption(text="layers: GeLU, four times as wide in the middle, dropout, no scores kept", holds=None),
            Assumption(text=recomputed, holds=None if shares[0].recomputes else True),
        ]
    return tuple(assumptions)


def _describe_scheme(shares: Sequence[ModelShare]) -> str:
    scheme, shards = shares[0].scheme, shares[0].shards
    return {
        "none": "every rank holds the whole state of its part of the model",
        "zero1": f"the optimizer's state is sharded evenly over {shards} ranks",
        "zero2": f"gradients and the optimizer's state are sharded over {shards} ranks, parameters gathered each step",
        "zero3": f"parameters, gradients and the optimizer's state are sharded evenly over {shards} ranks",
    }[scheme]


def _gradient_ratio(known: Sequence[tuple[Mapping[str, int | None], ModelShare]]) -> float | None:
    """Return the gradients over the parameters that they are of: of ZeRO-2, beside whole parameters, a shard."""
    ratios = [
        g / p * (share.shards if share.scheme == "zero2" and share.holds_whole else 1)
        for held, share in known
        if (g := held.get("gradients")) is not None and (p := held.get("parameters"))
    ]
    return float(np.mean(ratios)) if ratios else None


def _is_near(ratio: float | None, expected: float) -> bool | None:
    return None if ratio is None else abs(ratio / expected - 1) <= TOLERANCE


def find_headroom(nodes: Sequence[NodeMemory]) -> tuple[Headroom, ...]:
    """Return the headroom of each memory at its peak use, smallest first."""
    headrooms = [
        Headroom(
            host=memory.host,
            device=memory.device,
            capacity_bytes=memory.capacity_bytes,
            most_used_bytes=memory.most_used_bytes,
            headroom_bytes=max(0, memory.capacity_bytes - memory.most_used_bytes),
        )
        for memory in nodes
    ]
    return tuple(
        sorted(
            headrooms,
            key=lambda headroom: (headroom.headroom_bytes / headroom.capacity_bytes, headroom.host, headroom.device),
        )
    )
