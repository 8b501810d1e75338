"""Find the native hook for the torch of one interpreter: a prebuilt one, else compile it once, into a cache.

Runs as a script under the job's own interpreter, which need not have dtprof: standard library only, torch is located
and never imported. Prints one JSON object: {"library": path or null, "torch": version or null, "reason": text}.

    python build.py SCHEMA_HEADER SECONDS    SECONDS: how long it may compile, 0 not at all

Wheels for Linux carry prebuilt hooks, in folders named like those of the cache (`.ci/wheels.py` makes them).
"""

import contextlib
import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "native_hook.cpp"
MODULE = "dtprof_native_hook"
CHECKSUM = "sha256"
PREBUILT = FOLDER / "prebuilt"
RELEASE = re.compile(r"(\d+\.\d+\.\d+)(\+(cpu|cu\d+))?")
"""A release of torch whose builds for CPU and CUDA have the same headers, as far as the hook includes them."""
NCCL_SOURCE = FOLDER / "nccl_events.cpp"
NCCL_LIBRARY = "dtprof_nccl_events.so"
"""Beside the hook where torch has NCCL and the headers of both are installed; NCCL_REASON else says what is missing."""
NCCL_CHECKSUM = "nccl_events.sha256"
NCCL_REASON = "nccl_events.txt"
NVIDIA_DRIVER = Path("/dev/nvidiactl")
"""There where processes can use a GPU of NVIDIA."""
NCCL_HEADERS = ("cuda_runtime_api.h", "crt/host_defines.h", "nccl.h")
NOT_FOUND = "was not found beside torch"
"""In the reason why there is no such library: it is compiled once the header is there."""
FLAGS = [
    *("-O2", "-DNDEBUG", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden"),
    *("-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"),
]
LOCK_PERIOD_S = 0.2


class CannotBuildError(Exception):
    """Why there is no native hook; the job then uses the Python hook."""


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
    """Return the folder of compiled hooks: $DTPROF_CACHE_DIR, else below the user's cache folder.

    Raises:
        CannotBuildError: the user has no home folder, as in a container without a name for its user.
    """
    if given := os.environ.get("DTPROF_CACHE_DIR"):
        return Path(given)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dtprof"
    except RuntimeError as error:
        raise CannotBuildError("there is no home folder for the compiled hook (set DTPROF_CACHE_DIR)") from error


def binary_tag(torch_version: str) -> str:
    """Return the key of a compiled hook: the exact torch and the interpreter."""
    return f"{torch_version}-{sysconfig.get_config_var('SOABI')}"


def prebuilt_tag(torch_folder: Path, torch_version: str) -> str | None:
    """Return what a prebuilt hook is bound to: release and commit of torch, its C++ strings, the interpreter.

    None: this torch is no release, or does not say of which commit it is.
    """
    try:
        version = (torch_folder / "version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    release = RELEASE.fullmatch(torch_version)
    commit = re.search(r"git_version = '([0-9a-f]{8})[0-9a-f]*'", version)
    if release is None or commit is None:
        return None
    abi = "".join(flag[-1] for flag in abi_flags(torch_folder)) or "1"  # newer ones do not say; it is the default
    return f"{release[1]}-{commit[1]}-abi{abi}-{sysconfig.get_config_var('SOABI')}"


def source_digest(schema_header: str) -> str:
    """Return the end of a hook's folder name: of the source, the constants and the flags that it is compiled with."""
    digest = hashlib.sha256()
    sources = [path.read_text(encoding="utf-8") for path in sorted([*FOLDER.glob("*.cpp"), *FOLDER.glob("*.h")])]
    for part in (*sources, schema_header, " ".join(FLAGS)):
        digest.update(part.encode())
    return digest.hexdigest()[:16]


def library_path(torch_version: str, schema_header: str) -> Path:
    """Return where the hook for this torch, interpreter and source belongs.

    Raises:
        CannotBuildError: there is no cache folder.
    """
    name = f"{binary_tag(torch_version)}-{source_digest(schema_header)}"
    return cache_folder() / "native" / name / f"{MODULE}.so"


def prebuilt_path(torch_folder: Path, torch_version: str, schema_header: str) -> Path | None:
    """Return the prebuilt hook for this torch, interpreter and source; None where the wheel has none."""
    if (tag := prebuilt_tag(torch_folder, torch_version)) is None:
        return None
    library = PREBUILT / f"{tag}-{source_digest(schema_header)}" / f"{MODULE}.so"
    return library if is_intact(library) else None


def misfit(library: Path, torch_version: str, schema_header: str) -> str | None:
    """Return what this process runs where a hook was made for another torch, interpreter or dtprof; None if it fits."""
    name = library.parent.name
    digest = source_digest(schema_header)
    found = find_torch()
    tags = [binary_tag(torch_version), found and prebuilt_tag(found[0], torch_version)]
    if any(tag and name == f"{tag}-{digest}" for tag in tags):
        return None
    return f"{tags[0]}-{digest}"


def is_intact(library: Path, checksum: str = CHECKSUM) -> bool:
    """Say whether a compiled library is there, whole: loading a damaged one would kill the process."""
    try:
        digest = hashlib.sha256(library.read_bytes()).hexdigest()
        return library.with_name(checksum).read_text(encoding="ascii").strip() == digest
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


def compile_hook(
    torch_folder: Path, schema_header: str, library: Path, timeout_s: float, flags: Sequence[str] = ()
) -> None:
    """Compile the hook, with more flags for a prebuilt one.

    Raises:
        CannotBuildError: no compiler, no headers, or the compiler failed or took too long.
    """
    python_headers = Path(sysconfig.get_paths()["include"])
    for needed in (python_headers / "Python.h", torch_folder / "include" / "torch" / "library.h"):
        if not needed.exists():
            raise CannotBuildError(f"{needed} does not exist (install the development headers)")
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        Path(scratch, "schema.h").write_text(schema_header, encoding="utf-8")
        arguments = [
            f"-I{scratch}",
            f"-I{python_headers}",
            f"-DDTPROF_MODULE={MODULE}",
            *flags,
            str(SOURCE),
            # libstdc++ first: libraries of torch export copies of some of it.
            *("-lstdc++", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"),
        ]
        compile_library(arguments, torch_folder, library, CHECKSUM, timeout_s)


def compile_nccl_events(torch_folder: Path, library: Path, timeout_s: float) -> None:
    """Compile the reader of the events of NCCL's back end.

    Raises:
        CannotBuildError: headers of CUDA or NCCL are not there, or the compiler failed.
    """
    if (missing := missing_header(torch_folder)) is not None:
        raise CannotBuildError(
            f"{missing} {NOT_FOUND}, on Python's path, or in a CUDA toolkit: pip install nvidia-cuda-crt "
            "nvidia-cuda-cccl for the CUDA of this torch, or set CUDA_HOME"
        )
    folders = header_folders(torch_folder)
    includes = [f"-I{folder}" for folder in folders]
    arguments = [*includes, str(NCCL_SOURCE), *("-lc10", "-lc10_cuda", "-ltorch_cpu", "-ltorch_cuda")]
    compile_library(arguments, torch_folder, library, NCCL_CHECKSUM, timeout_s)


def missing_header(torch_folder: Path) -> str | None:
    """Return the first header that the library of NCCL's events needs and that is nowhere; None where all are there."""
    folders = [*header_folders(torch_folder), Path("/usr/include")]
    for header in NCCL_HEADERS:
        if not any((folder / header).exists() for folder in folders):
            return header
    return None


def header_folders(torch_folder: Path) -> list[Path]:
    """Return where headers of CUDA and NCCL may lie: packages of NVIDIA, those beside torch first, then the toolkit."""
    packages = dict.fromkeys(Path(place, "nvidia") for place in (str(torch_folder.parent), *sys.path) if place)
    folders = [folder for package in packages for folder in sorted(package.glob("*/include"))]
    nvcc = shutil.which("nvcc")
    toolkits = [os.environ.get("CUDA_HOME"), str(Path(nvcc).resolve().parents[1]) if nvcc else None, "/usr/local/cuda"]
    folders += [Path(toolkit, "include") for toolkit in toolkits if toolkit]
    return [place for folder in folders for place in (folder, folder / "cccl") if place.is_dir()]


def compile_library(
    arguments: Sequence[str], torch_folder: Path, library: Path, checksum_name: str, timeout_s: float
) -> None:
    """Compile into a temporary folder beside the library, then move the result into place.

    Raises:
        CannotBuildError: there is no compiler, or it failed or took too long.
    """
    headers = torch_folder / "include"
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        built = Path(scratch, library.name)
        includes = [f"-I{headers}", f"-I{headers / 'torch/csrc/api/include'}"]
        flags = [*FLAGS, *abi_flags(torch_folder), *includes, f"-L{torch_folder / 'lib'}"]
        command = [compiler(), *flags, *arguments, "-o", str(built)]
        status, output = run_compiler(command, timeout_s)
        if status != 0:
            log = library.with_suffix(".log") if library.name == NCCL_LIBRARY else library.with_name("build.log")
            log.write_text(" ".join(command) + "\n" + output, encoding="utf-8")
            raise CannotBuildError(f"{command[0]} failed with exit status {status}; its output is in {log}")
        checksum = Path(scratch, checksum_name)
        checksum.write_text(hashlib.sha256(built.read_bytes()).hexdigest() + "\n", encoding="ascii")
        checksum.replace(library.with_name(checksum_name))
        built.replace(library)


def abi_flags(torch_folder: Path) -> list[str]:
    """Return the flag for the strings of C++ that this torch was built with, as its CMake package tells."""
    try:
        config = (torch_folder / "share/cmake/Torch/TorchConfig.cmake").read_text(encoding="utf-8")
    except OSError:
        return []
    return re.findall(r"-D_GLIBCXX_USE_CXX11_ABI=\d", config)[:1]


def run_compiler(command: list[str], timeout_s: float) -> tuple[int, str]:
    """Return exit status and output of a compiler; one that takes too long is ended with all it has started.

    Raises:
        CannotBuildError: it took too long.
    """
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired as error:
            raise CannotBuildError(f"{command[0]} did not finish in {timeout_s:g} s") from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return status, output.read().decode("utf-8", "replace")


def take_lock(file: int, path: Path, timeout_s: float) -> None:
    """Wait until no other process compiles.

    Raises:
        CannotBuildError: another one did all this time.
    """
    until = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= until:
                raise CannotBuildError(f"another process has held {path} for {timeout_s:g} s") from None
            time.sleep(LOCK_PERIOD_S)
        else:
            return


def ensure(schema_header: str, *, timeout_s: float) -> dict[str, str | None]:
    """Return the hook for this interpreter, compiling it if need be; at most one process compiles at a time.

    Parameters:
        schema_header: the constants that the hook is compiled with.
        timeout_s: how long the compiler may take; 0: do not compile.
    """
    torch = find_torch()
    if torch is None:
        return {"library": None, "torch": None, "reason": "torch is not installed"}
    folder, version = torch
    answer: dict[str, str | None] = {"library": None, "torch": version, "reason": None}
    prebuilt = prebuilt_path(folder, version, schema_header)
    # Where no rank can use NCCL, nobody waits a minute for a library that reads its events.
    if prebuilt is not None and not (NVIDIA_DRIVER.exists() and can_compile_nccl_events(folder)):
        return answer | {"library": str(prebuilt)}
    try:
        library = library_path(version, schema_header)
        if not is_intact(library):
            compiler()
            if timeout_s == 0:
                return answer
            compile_once(folder, schema_header, library, timeout_s, prebuilt)
        elif headers_have_come(folder, library):
            if timeout_s == 0:
                return answer
            with contextlib.suppress(CannotBuildError):  # the hook is there
                compile_once(folder, schema_header, library, timeout_s, prebuilt)
    except CannotBuildError as error:
        if prebuilt is not None:
            return answer | {"library": str(prebuilt)}
        answer["reason"] = str(error)
    else:
        answer["library"] = str(library)
    return answer


def has_nccl(torch_folder: Path) -> bool:
    """Say whether this torch is built with NCCL."""
    return (torch_folder / "lib" / "libtorch_cuda.so").exists()


def can_compile_nccl_events(torch_folder: Path) -> bool:
    """Say whether this torch has NCCL, and headers and compiler for the library of its events are there."""
    try:
        compiler()
    except CannotBuildError:
        return False
    return has_nccl(torch_folder) and missing_header(torch_folder) is None


def headers_have_come(torch_folder: Path, library: Path) -> bool:
    """Say whether the library of NCCL's events was left out for want of a header that has been installed since."""
    try:
        reason = library.with_name(NCCL_REASON).read_text(encoding="utf-8")
        compiler()
    except (OSError, CannotBuildError):
        return False
    return NOT_FOUND in reason and missing_header(torch_folder) is None


def compile_once(
    torch_folder: Path, schema_header: str, library: Path, timeout_s: float, prebuilt: Path | None
) -> None:
    """Compile, unless another process has done so meanwhile; take the prebuilt hook where there is one.

    Raises:
        CannotBuildError: there is no hook now.
    """
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with library.with_name("lock").open("w") as lock:
            take_lock(lock.fileno(), library.with_name("lock"), timeout_s)
            if not is_intact(library):
                if prebuilt is None:
                    compile_hook(torch_folder, schema_header, library, timeout_s)
                else:
                    shutil.copyfile(prebuilt.with_name(CHECKSUM), library.with_name(CHECKSUM))
                    shutil.copyfile(prebuilt, library)
            if has_nccl(torch_folder) and not is_intact(library.with_name(NCCL_LIBRARY), NCCL_CHECKSUM):
                reason = library.with_name(NCCL_REASON)
                try:
                    compile_nccl_events(torch_folder, library.with_name(NCCL_LIBRARY), timeout_s)
                    reason.unlink(missing_ok=True)
                except CannotBuildError as error:  # the job has all else
                    reason.write_text(str(error), encoding="utf-8")
    except OSError as error:
        raise CannotBuildError(
            f"the cache folder {library.parent} cannot be used: {error.strerror or error}"
        ) from error
    if not is_intact(library):
        raise CannotBuildError(f"the compiled hook {library} was changed right after it was written")


def main() -> int:
    """Answer for the interpreter that runs this script."""
    header = Path(sys.argv[1]).read_text(encoding="utf-8")
    print(json.dumps(ensure(header, timeout_s=float(sys.argv[2]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
