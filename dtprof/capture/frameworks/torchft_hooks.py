"""Record what the groups of torchft are for: they join the replicas of a fault-tolerant job, and torch names none."""

from typing import Any

from dtprof.capture.frameworks.attribution import Attribution

_MODULE = "torchft.process_group"
AXIS = "dp_replicate"


class TorchFt:
    """Hooks into the process groups that torchft makes anew for each quorum."""

    def __init__(self, attribution: Attribution) -> None:
        """Attribute operations through `attribution`."""
        self._attribution = attribution

    def install(self) -> None:
        """Wait for the job to import torchft."""
        self._attribution.after_import(_MODULE, self._hook, ("ProcessGroupWrapper.configure",))

    def _hook(self, module: Any) -> None:
        wrapper = module.ProcessGroupWrapper
        if self._attribution.has_all(wrapper, ("configure",)):
            self._attribution.after(wrapper, "configure", self._declare_wrapper)

    def _declare_wrapper(self, _: None, wrapper: Any, *__: Any, **___: Any) -> None:
        group = wrapper._pg
        # A wrapper of a wrapper is configured through it.
        if group is not None and not hasattr(group, "configure"):
            self._attribution.declare_use(group, AXIS, "torchft")
