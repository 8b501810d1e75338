"""Hooks into the frameworks of torch that communicate on the user's behalf: who acts, for what, on which mesh.

One file a framework, which waits for the framework's module to be imported and imports nothing that the job does not.
"""

from collections.abc import Callable

from dtprof import fence
from dtprof.capture.frameworks.attribution import Acting
from dtprof.capture.frameworks.ddp_hooks import DataParallel
from dtprof.capture.frameworks.device_meshes import Meshes
from dtprof.capture.frameworks.dtensor_hooks import TensorParallel
from dtprof.capture.frameworks.fsdp_hooks import FullySharded
from dtprof.capture.frameworks.labelled_calls import Calls
from dtprof.capture.frameworks.pipeline_hooks import Pipelines
from dtprof.capture.frameworks.split_groups import Splits
from dtprof.capture.recorder import Recorder


@fence.fenced("on whose behalf frameworks act")
def install(recorder: Callable[[bool], Recorder | None]) -> None:
    """Hook the frameworks; the recorder is asked for when they act."""
    acting = Acting(recorder)
    for framework in (Meshes, Splits, Pipelines, FullySharded, DataParallel, TensorParallel, Calls):
        framework(acting).install()
