"""What the launcher knows of its node beside the records; every launcher makes one, most without any exposition."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from dtprof.records.nodes.node_samples import Sample


@dataclass(frozen=True, kw_only=True)
class NodeState:
    """What the launcher of this node knows beside the records."""

    run: str
    host: str
    is_hung: bool = False
    truncated: bool = False
    oom_kills: int = 0
    sample: Sample | None = None
    description: Mapping[str, object] = field(default_factory=dict)  # of the node, as samples.jsonl begins with
