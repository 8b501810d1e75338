"""Hooks into torch and frameworks that issue operations for the user: which component, for what, on which mesh.

One file a framework. Each waits for the framework's module to be imported, and imports nothing that the job does not.
"""

import functools
from collections.abc import Callable
from typing import Any, Protocol

from dtprof import fence
from dtprof.capture.frameworks import device_meshes, labelled_calls, split_groups
from dtprof.capture.frameworks.attribution import Attribution
from dtprof.capture.frameworks.ddp_hooks import DataParallel
from dtprof.capture.frameworks.deepspeed_hooks import DeepSpeed
from dtprof.capture.frameworks.dtensor_hooks import TensorParallel
from dtprof.capture.frameworks.fairscale_hooks import FairScale
from dtprof.capture.frameworks.fsdp_hooks import FullySharded
from dtprof.capture.frameworks.fsdp_stream_waits import StreamWaits
from dtprof.capture.frameworks.megatron_hooks import Megatron
from dtprof.capture.frameworks.pipeline_hooks import Pipelines
from dtprof.capture.frameworks.rpc_hooks import RemoteCalls
from dtprof.capture.frameworks.torchft_hooks import TorchFt
from dtprof.capture.frameworks.torchrec_hooks import TorchRec
from dtprof.capture.recorder import Recorder


class Adapter(Protocol):
    """What recognises a framework. It tells what it sees by `Attribution`, as far as the framework has it.

    Axes by `declare_use`, sharding by `declare_sharding`, operations by `begin` and `around`, pipelines by
    `PipelineActions`, phases by spans. Phases of optimizers, data loaders and checkpoints come from torch's.
    """

    def install(self) -> None:
        """Wait for the job to import the framework."""


FRAMEWORKS: tuple[Callable[[Attribution], Adapter], ...] = (
    Pipelines,
    FullySharded,
    StreamWaits,
    DataParallel,
    TensorParallel,
    RemoteCalls,
    Megatron,
    DeepSpeed,
    FairScale,
    TorchFt,
    TorchRec,
)


@fence.fenced("attribution to frameworks")
def install(recorder: Callable[[bool], Recorder | None]) -> None:
    """Hook the frameworks; they ask for the recorder when they issue operations."""
    attribution = Attribution(recorder)
    device_meshes.install(attribution)
    split_groups.install(attribution)
    for framework in FRAMEWORKS:
        framework(attribution).install()
    labelled_calls.install(attribution)
    attribution.after_import("torch.distributed.distributed_c10d", functools.partial(_watch_groups, attribution))


def _watch_groups(attribution: Attribution, module: Any) -> None:
    """Look for copies of frameworks whenever groups are created: by then the program has imported them."""
    for name in ("init_process_group", "new_group"):
        attribution.after(module, name, attribution.copies.find)
