"""Remember the groups that `ProcessGroup.split_group` creates: torch.distributed keeps no list of them."""

from collections.abc import Sequence
from typing import Any

from dtprof.capture import group_descriptions
from dtprof.capture.frameworks.attribution import Attribution


def install(attribution: Attribution) -> None:
    """Hook ProcessGroup once the job imports torch.distributed."""

    def hook(module: Any) -> None:
        if hasattr(module.ProcessGroup, "split_group"):
            attribution.after(module.ProcessGroup, "split_group", _remember)

    attribution.after_import("torch.distributed.distributed_c10d", hook)


def _remember(created: Any, parent: Any, ranks: Sequence[int], *_: Any, **__: Any) -> None:
    group_descriptions.remember_split(created, parent, ranks)
