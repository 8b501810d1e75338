"""What the figures were measured on: device, driver, versions."""

import os
import platform
import subprocess

import torch

from benchmarks.gpu.figures import Figure, emit


def main() -> None:
    """Print it as notes of figures."""
    emit(Figure(name="cores", value=os.cpu_count(), unit="", note=f"Python {platform.python_version()}"))
    emit(Figure(name="torch", value=None, unit="", note=f"{torch.__version__}, CUDA {torch.version.cuda}"))
    query = [
        "nvidia-smi",
        "--query-gpu=name,driver_version,memory.total,clocks.sm,clocks.max.sm",
        "--format=csv,noheader",
    ]
    try:
        described = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        described = f"nvidia-smi says nothing: {error}"
    count = torch.cuda.device_count()
    emit(Figure(name="CUDA devices", value=count, unit="", note=described))
    if torch.distributed.is_nccl_available():
        version = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        emit(Figure(name="NCCL", value=None, unit="", note=version))


if __name__ == "__main__":
    main()
