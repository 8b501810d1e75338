"""Facts of a node that its launcher knows beside the records; every launcher makes one, most without exposition."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtprof.records.nodes.node_samples import Sample


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """Facts of this node that its launcher knows beside the records."""

    run: str
    host: str
    is_hung: bool = False
    truncated: bool = False
    oom_kills: int = 0
    sample: Sample | None = None
    description: Mapping[str, object] = field(default_factory=dict)  # of the node, as samples.jsonl begins with
