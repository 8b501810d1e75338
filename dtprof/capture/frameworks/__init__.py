"""Hooks into the frameworks of torch that communicate on the user's behalf: who acts, for what, on which mesh.

One file a framework, which waits for the framework's module to be imported and imports nothing that the job does not.
"""

from collections.abc import Callable

from dtprof import fence
from dtprof.capture.frameworks.acting import Acting
from dtprof.capture.frameworks.calls import Calls
from dtprof.capture.frameworks.ddp import DataParallel
from dtprof.capture.frameworks.fsdp import FullySharded
from dtprof.capture.frameworks.meshes import Meshes
from dtprof.capture.frameworks.pipeline import Pipelines
from dtprof.capture.frameworks.splits import Splits
from dtprof.capture.frameworks.tensor_parallel import TensorParallel
from dtprof.capture.recorder import Recorder


@fence.fenced("on whose behalf frameworks act")
def install(recorder: Callable[[bool], Recorder | None]) -> None:
    """Hook the frameworks; the recorder is asked for when they act."""
    acting = Acting(recorder)
    for framework in (Meshes, Splits, Pipelines, FullySharded, DataParallel, TensorParallel, Calls):
        framework(acting).install()
