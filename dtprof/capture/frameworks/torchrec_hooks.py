"""Record that torchrec's DistributedModelParallel shards embedding tables, each in a way of its own."""

from typing import Any

from dtprof.capture.frameworks.attribution import Attribution

_MODULE = "torchrec.distributed.model_parallel"
_REPLICATED = "data_parallel"


class TorchRec:
    """Hooks into the constructor of DistributedModelParallel."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution

    def install(self) -> None:
        """Wait for the job to import torchrec."""
        self._attribution.after_import(_MODULE, self._hook)

    def _hook(self, module: Any) -> None:
        self._attribution.after(module.DistributedModelParallel, "__init__", self._declare_tables)

    def _declare_tables(self, _: None, created: Any, *__: Any, **___: Any) -> None:
        group = created._env.process_group
        plans = [plan for plan in created._plan.plan.values() if isinstance(plan, dict)]
        if group is not None and any(table.sharding_type != _REPLICATED for plan in plans for table in plan.values()):
            self._attribution.declare_sharding("tables", group, "torchrec")
