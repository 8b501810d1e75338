"""Record how FairScale shards the model: OSS, ShardedDataParallel, FullyShardedDataParallel."""

import functools
from typing import Any

from dtprof.capture.frameworks.attribution import Attribution

_BY = "fairscale"
_CLASSES = (  # module, class, attribute with its group, what is sharded
    ("fairscale.optim.oss", "OSS", "group", "zero1"),
    ("fairscale.nn.data_parallel.sharded_ddp", "ShardedDataParallel", "_process_group", "zero2"),
    ("fairscale.nn.data_parallel.fully_sharded_data_parallel", "FullyShardedDataParallel", "process_group", "zero3"),
)


class FairScale:
    """Hooks into the constructors of FairScale's wrappers."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution

    def install(self) -> None:
        """Wait for the job to import the wrappers."""
        for module, name, group, scheme in _CLASSES:
            self._attribution.after_import(module, functools.partial(self._hook, name, group, scheme))

    def _hook(self, name: str, group: str, scheme: str, module: Any) -> None:
        self._attribution.after(getattr(module, name), "__init__", functools.partial(self._see, group, scheme))

    def _see(self, group: str, scheme: str, _: Any, created: Any, *__: Any, **___: Any) -> None:
        self._attribution.declare_use(getattr(created, group), "dp", _BY)
        self._attribution.declare_sharding(scheme, getattr(created, group), _BY)
