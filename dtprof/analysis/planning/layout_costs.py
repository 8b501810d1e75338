"""Memory and step time of layouts, all of them side by side: one row of each array a layout.

Ranks count through tp first, then cp, then fsdp and dp, then pp: an axis whose ranks span hosts has the network's
bandwidth. Formulas are those of docs/reference/metrics.md and docs/explanation/how-plans-are-made.md.
"""

from dataclasses import dataclass

import numpy as np

from dtprof.analysis.memory.memory_formulas import layer_activation_factor
from dtprof.analysis.planning.model_shapes import ModelShape
from dtprof.intervals import Column, Floats, Mask

SCHEDULES = ("none", "GPipe", "1F1B", "Interleaved1F1B", "ZB-H1", "ZBV")
NONE, GPIPE, ONE_F_ONE_B, INTERLEAVED, ZB_H1, ZBV = range(len(SCHEDULES))
CHUNKS = np.array([1, 1, 1, 2, 1, 2])
VALUE_BYTES, GRADIENT_BYTES, STATE_BYTES = 2, 2, 12
"""Of a parameter in mixed precision with Adam: value, gradient, and two moments with a copy in 32 bits."""
OVERLAPPED = 0.9
"""Of the time that data-parallel collectives could hide behind, how much they do."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """The cluster that a model is trained on."""

    ranks: int
    ranks_per_host: int
    memory_bytes: float | None
    link_bytes_per_s: float | None  # between ranks of a host
    network_bytes_per_s: float | None  # of a rank, between hosts
    latency_s: float = 20e-6
    flops_per_s: float | None = None  # that a rank achieves on the model
    other_bytes: float = 0.0  # of a rank, besides model and activations, as runs showed it


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Layouts, a row each."""

    dp: Column
    fsdp: Column
    tp: Column
    pp: Column
    cp: Column
    ep: Column
    schedule: Column  # position in SCHEDULES
    microbatches: Column
    sequences: Floats  # of a microbatch on one rank

    def chosen(self, rows: Column | Mask) -> "Layouts":
        """Return some of them."""
        return Layouts(**{name: column[rows] for name, column in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of layouts; NaN where unknown."""

    memory: dict[str, Floats]  # bytes by category
    step_s: Floats
    bubble: Floats  # share of the pipeline's window
    exposed_s: Floats

    @property
    def memory_total(self) -> Floats:
        """Return the bytes of all categories."""
        total: Floats = np.sum(list(self.memory.values()), axis=0)
        return total


def measure_costs(model: ModelShape, layouts: Layouts, cluster: Cluster, *, recompute: bool) -> Costs:
    """Return memory and step time of each layout."""
    bubble = bubble_fractions(layouts)
    compute = _compute_s(model, layouts, cluster, recompute=recompute)
    exposed = _exposed_s(model, layouts, cluster, compute)
    return Costs(
        memory=_memory(model, layouts, cluster, recompute=recompute),
        step_s=(compute + exposed) / (1 - bubble),
        bubble=bubble,
        exposed_s=exposed,
    )


def bubble_fractions(layouts: Layouts) -> Floats:
    """Return the bubble of each schedule with equal stage times: (p-1)/(m+p-1), and its kin."""
    p, m, chunks = layouts.pp, layouts.microbatches, CHUNKS[layouts.schedule]
    # Of one microbatch's time: a third of a forward and backward for ZB-H1, a sixth for stages in a V.
    part = np.array([0.0, 1.0, 1.0, 1.0, 1 / 3, 1 / 3])[layouts.schedule] / chunks
    idle = (p - 1) * part
    fraction: Floats = idle / (m + idle)
    return fraction


def _local_parameters(model: ModelShape, layouts: Layouts) -> tuple[Floats, Floats]:
    """Return the parameters that the fullest rank computes with, dense and of experts, before FSDP."""
    per_layer = (model.total_parameters - 2 * model.embedding_parameters) / model.layers
    layers = np.ceil(model.layers / layouts.pp)
    ends = np.where(layouts.pp > 1, 1, 2) * model.embedding_parameters
    dense = (layers * per_layer * (1 - model.expert_share) + ends) / layouts.tp
    experts = layers * per_layer * model.expert_share / (layouts.tp * layouts.ep)
    return dense, experts


def _memory(model: ModelShape, layouts: Layouts, cluster: Cluster, *, recompute: bool) -> dict[str, Floats]:
    dense, experts = _local_parameters(model, layouts)
    held = dense / layouts.fsdp + experts / np.maximum(1, layouts.fsdp / layouts.ep)
    layers = np.ceil(model.layers / layouts.pp)
    values = layouts.sequences * model.sequence * model.hidden / layouts.cp
    kept = layer_activation_factor(layouts.tp, is_sequence_parallel=False, recomputes=recompute)
    waiting = np.minimum(_in_flight(layouts), np.maximum(1, layouts.microbatches))
    logits = layouts.sequences * model.sequence * model.vocabulary / (layouts.tp * layouts.cp) * 6
    gathered = np.where(layouts.fsdp > 1, 2 * (dense + experts) / layers * VALUE_BYTES, 0.0)
    return {
        "parameters": held * VALUE_BYTES,
        "gradients": held * GRADIENT_BYTES,
        "optimizer_state": held * STATE_BYTES,
        "activations": values * kept * layers * waiting + logits,
        "communication": gathered,
        "other": np.full(len(layouts.dp), cluster.other_bytes),
    }


def _in_flight(layouts: Layouts) -> Floats:
    """Return of how many microbatches the fullest rank keeps the activations of all its layers."""
    p, m = layouts.pp.astype(np.float64), layouts.microbatches.astype(np.float64)
    kinds = [np.ones(len(p)), m, p, p + (p - 1) / 2, p, p]
    chosen: Floats = np.choose(layouts.schedule, kinds)
    return chosen


def _compute_s(model: ModelShape, layouts: Layouts, cluster: Cluster, *, recompute: bool) -> Floats:
    """Return how long a rank computes in a step."""
    if cluster.flops_per_s is None:
        return np.full(len(layouts.dp), np.nan)
    replicas = layouts.dp * layouts.fsdp
    tokens = layouts.sequences * layouts.microbatches * replicas * model.sequence
    flops = tokens * model.flops_per_token * (4 / 3 if recompute else 1.0)
    # The fullest stage sets the pace.
    uneven = np.ceil(model.layers / layouts.pp) * layouts.pp / model.layers
    seconds: Floats = flops * uneven / (cluster.ranks * cluster.flops_per_s)
    return seconds


def _exposed_s(model: ModelShape, layouts: Layouts, cluster: Cluster, compute: Floats) -> Floats:
    """Return how long a rank waits for transfers in a step."""
    layers, m = np.ceil(model.layers / layouts.pp), layouts.microbatches
    values = layouts.sequences * model.sequence * model.hidden / layouts.cp * VALUE_BYTES
    dense, experts = _local_parameters(model, layouts)

    def ring(size: Column, nbytes: Floats, stride: Column) -> Floats:
        """Return the time of one pass round a ring: half an all_reduce."""
        bandwidth = np.where(
            size * stride <= cluster.ranks_per_host,
            cluster.link_bytes_per_s or np.nan,
            cluster.network_bytes_per_s or np.nan,
        )
        seconds: Floats = np.where(
            size > 1, (size - 1) / size * nbytes / bandwidth + (size - 1) * cluster.latency_s, 0.0
        )
        return seconds

    one = np.ones_like(layouts.tp)
    tensor = 4 * 2 * layers * m * ring(layouts.tp, values, one)
    kv = values * model.kv_heads / model.heads * 2
    context = 3 * layers * m * ring(layouts.cp, kv * layouts.cp / layouts.tp, layouts.tp)
    stride = layouts.tp * layouts.cp
    shards = ring(layouts.fsdp, (dense + experts) * VALUE_BYTES, stride) * 3
    replicas = 2 * ring(layouts.dp, (dense + experts) / layouts.fsdp * GRADIENT_BYTES, stride * layouts.fsdp)
    exchanged = 4 * layers * m * ring(layouts.ep, values * model.active_experts, stride) if model.experts > 1 else 0.0
    hidden = np.where(np.isnan(compute), 0.0, compute * OVERLAPPED * 2 / 3)
    data = np.maximum(shards + replicas - hidden, (shards + replicas) / layers)
    between = np.where(
        cluster.ranks > cluster.ranks_per_host,
        cluster.network_bytes_per_s or np.nan,
        cluster.link_bytes_per_s or np.nan,
    )
    message = values / layouts.tp / between + cluster.latency_s
    messages = np.where(layouts.pp > 1, 2 * (layouts.pp - 1 + m * (CHUNKS[layouts.schedule] - 1)) * message, 0.0)
    total: Floats = tensor + context + exchanged + data + messages
    return total
