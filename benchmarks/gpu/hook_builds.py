"""Compile the native hook and the library that reads NCCL's events against the torch installed, and load both."""

import ctypes
import os
import sys
import time
from pathlib import Path

import torch

from benchmarks.gpu.figures import Figure, emit
from dtprof import settings
from dtprof.capture.native import build, loader
from dtprof.launch import interpreter


def main() -> None:
    """Print how long the compilers took, and whether what they made can be loaded; needs no GPU.

    Raises:
        RuntimeError: the hook, or with a torch for CUDA the library of NCCL, cannot be compiled or loaded.
    """
    began_s = time.monotonic()
    hook = interpreter.choose_hook(sys.executable, native=True, environment=dict(os.environ), say=print)
    took_s = time.monotonic() - began_s
    if hook.library is None:
        raise RuntimeError(f"there is no native hook: {hook.message}")
    emit(Figure(name="both libraries compiled or found", value=took_s, unit="s", note=hook.message or ""))
    os.environ[settings.ENV_NATIVE_HOOK] = hook.library
    native, reason = loader.load(torch.__version__)
    if native is None:
        raise RuntimeError(reason)
    emit(Figure(name="native hook loads", value=1, unit="", met=True, note=Path(hook.library).parent.name))
    if torch.version.cuda is None:
        emit(Figure(name="NCCL library loads", value=None, unit="", note="this torch is built without CUDA"))
        return
    if reason := loader.use_nccl_events(native):
        raise RuntimeError(f"the library of NCCL's events is missing: {reason}")
    library = ctypes.CDLL(str(Path(hook.library).with_name(build.NCCL_LIBRARY)))
    found = hasattr(library, "dtprof_find_kernel_events")
    emit(Figure(name="NCCL library loads", value=1, unit="", met=found))


if __name__ == "__main__":
    main()
