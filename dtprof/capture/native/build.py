"""Compile the native tap for the torch of one interpreter, once, into a cache.

Runs as a script under the job's own interpreter, which need not have dtprof: standard library only, torch is located
and never imported. Prints one JSON object: {"library": path or null, "torch": version or null, "reason": text}.

    python build.py SCHEMA_HEADER [--describe]
"""

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("tap.cpp")
MODULE = "dtprof_tap"
CHECKSUM = "sha256"
FLAGS = ["-O2", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
TIMEOUT_S = 600


class CannotBuildError(Exception):
    """Why there is no native tap; the job then uses the Python tap."""


def find_torch() -> tuple[Path, str] | None:
    """Return torch's folder and version in this interpreter, without importing it."""
    try:
        spec = importlib.util.find_spec("torch")
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent
    try:
        match = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text(encoding="utf-8"))
    except OSError:
        return None
    return (folder, match[1]) if match else None


def cache_folder() -> Path:
    """Return the folder of compiled taps: $DTPROF_CACHE_DIR, else below the user's cache folder."""
    if given := os.environ.get("DTPROF_CACHE_DIR"):
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtprof"


def binary_tag(torch_version: str) -> str:
    """Return what a compiled tap is bound to: the exact torch and the interpreter."""
    return f"{torch_version}-{sysconfig.get_config_var('SOABI')}"


def library_path(torch_version: str, schema_header: str) -> Path:
    """Return where the tap for this torch, interpreter and source belongs."""
    digest = hashlib.sha256()
    for part in (SOURCE.read_text(encoding="utf-8"), schema_header, " ".join(FLAGS)):
        digest.update(part.encode())
    name = f"{binary_tag(torch_version)}-{digest.hexdigest()[:16]}"
    return cache_folder() / "native" / name / f"{MODULE}.so"


def is_intact(library: Path) -> bool:
    """Say whether a compiled tap is there, whole: loading a damaged one would kill the process."""
    try:
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        return library.with_name(CHECKSUM).read_text(encoding="ascii").strip() == digest
    except (OSError, UnicodeDecodeError):
        return False


def compiler() -> str:
    """Return the C++ compiler to use.

    Raises:
        CannotBuildError: none is on the path.
    """
    for name in filter(None, (os.environ.get("CXX"), "g++", "c++", "clang++")):
        if found := shutil.which(name):
            return found
    raise CannotBuildError("no C++ compiler was found (install g++, or set CXX)")


def compile_tap(torch_folder: Path, torch_version: str, schema_header: str, library: Path) -> None:
    """Compile into a temporary folder beside the library, then move the result into place.

    Raises:
        CannotBuildError: no compiler, no headers, or the compiler failed.
    """
    python_headers = Path(sysconfig.get_paths()["include"])
    for needed in (python_headers / "Python.h", torch_folder / "include" / "torch" / "library.h"):
        if not needed.exists():
            raise CannotBuildError(f"{needed} does not exist (install the development headers)")
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        Path(scratch, "schema.h").write_text(schema_header, encoding="utf-8")
        built = Path(scratch, library.name)
        includes = [scratch, torch_folder / "include", torch_folder / "include/torch/csrc/api/include", python_headers]
        command = [
            compiler(),
            *FLAGS,
            *(f"-I{folder}" for folder in includes),
            f"-DDTPROF_MODULE={MODULE}",
            f'-DDTPROF_TORCH_VERSION="{torch_version}"',
            str(SOURCE),
            "-o",
            str(built),
            f"-L{torch_folder / 'lib'}",
            *("-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        ]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise CannotBuildError(f"{command[0]} did not finish in {TIMEOUT_S} s") from error
        if result.returncode != 0:
            log = library.with_name("build.log")
            log.write_text(" ".join(command) + "\n" + result.stdout + result.stderr, encoding="utf-8")
            raise CannotBuildError(f"{command[0]} failed with exit status {result.returncode}; its output is in {log}")
        checksum = Path(scratch, CHECKSUM)
        checksum.write_text(hashlib.sha256(built.read_bytes()).hexdigest() + "\n", encoding="ascii")
        checksum.replace(library.with_name(CHECKSUM))
        built.replace(library)


def ensure(schema_header: str, *, may_build: bool) -> dict[str, str | None]:
    """Return the tap for this interpreter, compiling it if need be; at most one process compiles at a time."""
    torch = find_torch()
    if torch is None:
        return {"library": None, "torch": None, "reason": "torch is not installed"}
    folder, version = torch
    library = library_path(version, schema_header)
    answer: dict[str, str | None] = {"library": None, "torch": version, "reason": None}
    if not is_intact(library):
        try:
            compiler()
            if not may_build:
                return answer
            library.parent.mkdir(parents=True, exist_ok=True)
            with library.with_name("lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not is_intact(library):
                    compile_tap(folder, version, schema_header, library)
        except CannotBuildError as error:
            answer["reason"] = str(error)
        except OSError as error:
            answer["reason"] = f"the cache folder {library.parent} cannot be used: {error.strerror or error}"
    if is_intact(library):
        answer["library"] = str(library)
    return answer


def main() -> int:
    """Answer for the interpreter that runs this script."""
    header = Path(sys.argv[1]).read_text(encoding="utf-8")
    print(json.dumps(ensure(header, may_build="--describe" not in sys.argv)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
