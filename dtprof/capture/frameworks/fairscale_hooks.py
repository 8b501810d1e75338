"""Record how FairScale shards the model: OSS, ShardedDataParallel, FullyShardedDataParallel."""

import functools
from typing import Any

from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.frameworks.copies import owner_of

_CLASSES = (  # module, class, a method that no other class of this name has, attribute with its group, what is sharded
    ("optim.oss", "OSS", "partition_parameters", "group", "zero1"),
    ("nn.data_parallel.sharded_ddp", "ShardedDataParallel", "refresh_trainable", "_process_group", "zero2"),
    (
        "nn.data_parallel.fully_sharded_data_parallel", "FullyShardedDataParallel", "_rebuild_full_params",
        "process_group", "zero3",
    ),
)  # fmt: skip


class FairScale:
    """Hooks into the constructors of FairScale's wrappers."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution

    def install(self) -> None:
        """Wait for the job to import the wrappers."""
        for path, name, method, group, scheme in _CLASSES:
            hook = functools.partial(self._hook, path, name, group, scheme)
            self._attribution.after_import(f"fairscale.{path}", hook, (f"{name}.{method}",))

    def _hook(self, path: str, name: str, group: str, scheme: str, module: Any) -> None:
        declare = functools.partial(self._declare_wrapper, owner_of(module, path), group, scheme)
        self._attribution.after(getattr(module, name), "__init__", declare)

    def _declare_wrapper(self, by: str, group: str, scheme: str, _: Any, created: Any, *__: Any, **___: Any) -> None:
        self._attribution.declare_use(getattr(created, group), "dp", by)
        self._attribution.declare_sharding(scheme, getattr(created, group), by)
