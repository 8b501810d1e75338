"""Compile the simulated accelerator once per torch, interpreter and source, into the cache of compiled hooks.

`python -m tests.accelerator.compiled_device` compiles it beforehand: the gate does so while the unit tests run.
"""

import hashlib
import sysconfig
import tempfile
from pathlib import Path

from dtprof.capture.native import build

SOURCES = Path(__file__).parent / "native"
MODULE = "simulated_device_native"
FLAGS = [
    *("-O1", "-std=c++20", "-g0", "-fPIC", "-shared", "-fno-strict-aliasing", "-fvisibility=hidden"),
    *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO", f"-DSIM_MODULE={MODULE}"),
]
COMPILES_WITHIN_S = 600


class NoCompilerError(Exception):
    """Why there is no simulated accelerator on this machine: its tests are skipped, and say so."""


def library_path(torch_version: str) -> Path:
    """Return where the library for this torch, interpreter and source belongs."""
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for source in sorted(SOURCES.iterdir()):
        digest.update(source.name.encode() + source.read_bytes())
    name = f"{build.binary_tag(torch_version)}-{digest.hexdigest()[:16]}"
    return build.cache_folder() / "simulated_device" / name / f"{MODULE}.so"


def ensure_library() -> Path:
    """Return the library, compiled if need be; of several processes one compiles, the others wait for it.

    Raises:
        NoCompilerError: there is no C++ compiler.
        RuntimeError: the compiler failed.
    """
    torch = build.find_torch()
    assert torch is not None
    folder, version = torch
    library = library_path(version)
    if library.exists():
        return library
    try:
        compiler = build.compiler()
    except build.CannotBuildError as error:
        raise NoCompilerError(f"no simulated accelerator: {error}") from error
    library.parent.mkdir(parents=True, exist_ok=True)
    lock_path = library.with_name("lock")
    with lock_path.open("w") as lock:
        build.take_lock(lock.fileno(), lock_path, COMPILES_WITHIN_S)
        if not library.exists():
            compile_library(compiler, folder, library)
    return library


def compile_library(compiler: str, torch_folder: Path, library: Path) -> None:
    """Compile beside the library and move the result into place."""
    include = torch_folder / "include"
    folders = [include, include / "torch/csrc/api/include", Path(sysconfig.get_paths()["include"])]
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch, library.name)
        command = [
            *(compiler, *FLAGS, *(f"-I{folder}" for folder in folders)),
            *(str(SOURCES / "simulated_device.cpp"), "-o", str(built), f"-L{torch_folder / 'lib'}"),
            *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        ]
        status, output = build.run_compiler(command, COMPILES_WITHIN_S)
        if status != 0:
            raise RuntimeError(f"{' '.join(command)} failed with exit status {status}:\n{output}")
        built.replace(library)


if __name__ == "__main__":
    try:
        print(ensure_library())
    except NoCompilerError as missing:
        print(missing)  # what needs it is skipped, and says so
