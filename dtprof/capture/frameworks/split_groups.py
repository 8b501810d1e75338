"""Know the groups that `ProcessGroup.split_group` makes, of which torch.distributed keeps no list."""

from collections.abc import Sequence
from typing import Any

from dtprof.capture import group_descriptions
from dtprof.capture.frameworks.attribution import Acting


class Splits:
    """Hooks into ProcessGroup, which returns a new group to those of its members that are in it."""

    def __init__(self, acting: Acting) -> None:
        """Keep who watches functions."""
        self._acting = acting

    def install(self) -> None:
        """Wait for the job to import torch.distributed."""
        self._acting.after_import("torch.distributed.distributed_c10d", self._hook)

    def _hook(self, module: Any) -> None:
        if hasattr(module.ProcessGroup, "split_group"):
            self._acting.after(module.ProcessGroup, "split_group", _know)


def _know(made: Any, parent: Any, ranks: Sequence[int], *_: Any, **__: Any) -> None:
    group_descriptions.know_split(made, parent, ranks)
