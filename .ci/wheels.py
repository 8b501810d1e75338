"""Build the sdist, the wheel for every machine, and the wheel for Linux on x86-64 with prebuilt native hooks.

    .venv/bin/python .ci/wheels.py [PYTHON:TORCH ...] [--folder DIST] [--scratch FOLDER] [--twice]

Needs g++, binutils, the Pythons with their headers (python3.12 on PATH, or of pyenv), and PyPI. Of torch it takes what
the compiler reads, one release at a time; a release is up to 0.9 GB, of which 40 MB stay until its hooks are compiled.
Hooks that --scratch holds already are kept: a call that was cut off goes on. The same sources give the same bytes:
--twice compiles every hook a second time, elsewhere, and compares.
"""

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

from dtprof.capture.native import build  # noqa: E402
from dtprof.records import schema  # noqa: E402
from tests.matrix.pythons import find_python  # noqa: E402

TORCHES = ("2.6.0", "2.7.1", "2.8.0", "2.9.1", "2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""The last release of each minor version; jobs with another one compile the hook once."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
UNRELEASED = {("3.10", "2.15.0")}
"""Pairs that torch has no wheel for."""
PLATFORM = "manylinux_2_28_x86_64"
NEEDED = {"libc10.so", "libtorch_cpu.so", "libstdc++.so.6", "libm.so.6", "libgcc_s.so.1", "libc.so.6"}
NEEDED |= {"ld-linux-x86-64.so.2", "libpthread.so.0", "libdl.so.2"}
NEWEST_SYMBOLS = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""What a system of that platform has at least."""
OF_LIBSTDCXX = re.compile(r"_Z(N[KVRO]*)?S[tsabiod]|_ZT[IVTS]N?S[tsabiod]|_Z(nw|na|dl|da)")
LARGEST_WHEEL = 15_000_000
STRINGS_OF_A_MACHINE = re.compile(rb"/(?:home|root|tmp|work|build|usr/local|var|opt)/[\x21-\x7e]+")
EPOCH = "1767225600"
"""Time of every file in the wheels: 2026-01-01."""
COMPILER_TIMEOUT_S = 1800.0
COMPILE = """
import sys
from pathlib import Path
sys.path[:0] = [sys.argv[1]]
from dtprof.capture.native import build
torch, header, library, *flags = sys.argv[2:]
flags.append(f"-ffile-prefix-map={build.sysconfig.get_paths()['include']}=python")
build.compile_hook(Path(torch), Path(header).read_text(), Path(library), float(1800), flags)
"""


class WheelError(Exception):
    """Something that must not be released."""


def unpacked_torch(torch: str, python: str, folder: Path) -> Path:
    """Return a folder with what the compiler reads of a release of torch, from its wheel."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-cache-dir", "--dest", str(folder)]
    command += ["--only-binary", ":all:", "--python-version", python, f"torch=={torch}"]
    for platform in (PLATFORM, "manylinux_2_17_x86_64", "manylinux2014_x86_64", "manylinux1_x86_64"):
        command += ["--platform", platform]
    if (fetched := subprocess.run(command, capture_output=True, text=True, check=False)).returncode != 0:
        lines = [line for line in fetched.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or [f"exit status {fetched.returncode} of pip"])[0]
        raise WheelError(f"torch {torch} for Python {python} cannot be fetched: {reason}")
    (wheel,) = folder.glob("torch-*.whl")
    wanted = re.compile(
        r"torch/(include/.*|version\.py|share/cmake/Torch/TorchConfig\.cmake|lib/lib(c10|torch|torch_cpu|torch_python)\.so)"
    )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if wanted.fullmatch(name)])
    wheel.unlink()
    return folder / "torch"


def torch_version(folder: Path) -> str:
    """Return the version that a folder of torch says of itself."""
    match = re.search(r"__version__ = '([^']+)'", (folder / "version.py").read_text(encoding="utf-8"))
    if match is None:
        raise WheelError(f"{folder}/version.py names no version")
    return match[1]


def tag_for(python: str, torch: Path) -> str:
    """Return the tag of a hook, as an interpreter of that version says it."""
    code = "import sys; sys.path[:0] = [sys.argv[1]]; from dtprof.capture.native import build; "
    code += "from pathlib import Path; print(build.prebuilt_tag(Path(sys.argv[2]), sys.argv[3]) or '')"
    tag = subprocess.run(
        [python, "-c", code, str(REPOSITORY), str(torch), torch_version(torch)],
        capture_output=True,
        text=True,
        check=True,
    )
    if not tag.stdout.strip():
        raise WheelError(f"torch {torch_version(torch)} is no release: a prebuilt hook for it could not be recognised")
    return tag.stdout.strip()


def compile_hook(python: str, torch: Path, library: Path) -> None:
    """Compile one hook, so that no path and no time of this machine is in it."""
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder, "schema.h")
        header.write_text(schema.cpp_header(), encoding="utf-8")
        flags = [
            f"-ffile-prefix-map={torch}=torch",
            f"-ffile-prefix-map={build.FOLDER}=dtprof",
            f"-ffile-prefix-map={library.parent}=.",
            *("-include", str(build.FOLDER / "old_glibc.h")),
            *("-s", "-Wl,--build-id=none", "-Wl,--as-needed"),
        ]
        subprocess.run(
            [python, "-c", COMPILE, str(REPOSITORY), str(torch), str(header), str(library), *flags],
            check=True, timeout=COMPILER_TIMEOUT_S,
        )  # fmt: skip


def read_elf(library: Path, *options: str) -> str:
    """Return what readelf says."""
    command = ["readelf", "--wide", *options, str(library)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def dynamic_symbols(library: Path, *, defined: bool) -> set[str]:
    """Return the dynamic symbols that a library defines or lacks, with their versions."""
    symbols = set()
    for line in read_elf(library, "--dyn-syms").splitlines():
        cells = line.split()
        if len(cells) < 8 or not cells[0].endswith(":") or (cells[6] != "UND") != defined:
            continue
        if defined or cells[4] != "WEAK":
            symbols.add(cells[7])
    return symbols


def problems(library: Path) -> Iterator[str]:
    """Say what of a hook would not work, or would tell of this machine, elsewhere."""
    dynamic = read_elf(library, "--dynamic")
    for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic):
        if name not in NEEDED:
            yield f"needs {name}"
    if re.search(r"\((RPATH|RUNPATH|TEXTREL)\)", dynamic):
        yield "has a search path, or relocations in its text"
    for name, version in set(re.findall(r"Name: ([A-Z]+)_([\d.]+)", read_elf(library, "--version-info"))):
        newest = NEWEST_SYMBOLS.get(name)
        if newest is None or tuple(map(int, version.split("."))) > newest:
            yield f"needs {name}_{version}, newer than {PLATFORM} has"
    for name in sorted(dynamic_symbols(library, defined=False)):
        if "@" not in name and OF_LIBSTDCXX.match(name):  # some builds of torch export it, others do not
            yield f"takes {name} from a library of torch: old_glibc.h must define it"
    if "GNU_STACK" in (headers := read_elf(library, "--program-headers")) and re.search(r"GNU_STACK.*RWE", headers):
        yield "wants an executable stack"
    for found in sorted(set(STRINGS_OF_A_MACHINE.findall(library.read_bytes()))):
        yield f"contains the path {found.decode('ascii')}"


def missing_symbols(library: Path, torch: Path, python: str) -> set[str]:
    """Return the symbols of torch and Python that a hook asks for and its libraries and the interpreter lack."""
    have: set[str] = set()
    for name in ("libc10.so", "libtorch_cpu.so"):
        have |= {symbol.split("@")[0] for symbol in dynamic_symbols(torch / "lib" / name, defined=True)}
    for file in files_of_interpreter(python):
        have |= {symbol.split("@")[0] for symbol in dynamic_symbols(file, defined=True)}
    asked = dynamic_symbols(library, defined=False)
    return {name for name in asked - have if re.match(r"_?Py|_Z.*(3c10|4c10d|2at|5torch|6caffe2)", name)}


def files_of_interpreter(python: str) -> list[Path]:
    """Return the files that export the C API: the executable, and libpython where it is shared."""
    code = "import sys, sysconfig; print(sys.executable, sysconfig.get_config_var('LIBDIR'), "
    code += "sysconfig.get_config_var('INSTSONAME'), sep='\\n')"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    executable, folder, name = said
    return [file for file in (Path(executable), Path(folder, name)) if file.suffix != ".a" and file.exists()]


def make_hooks(pairs: Sequence[tuple[str, str]], prebuilt: Path, *, twice: bool) -> None:
    """Compile and inspect the hooks of all pairs; those already there are only inspected."""
    for torch in dict.fromkeys(torch for _, torch in pairs):
        pythons = [python for python, other in pairs if other == torch]
        done = [python for python in pythons if list(prebuilt.glob(f"{torch}-*-cpython-{python.replace('.', '')}-*"))]
        if len(done) == len(pythons):
            print(f"torch {torch}: the hooks are there", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder:
            unpacked = unpacked_torch(torch, pythons[0], Path(folder))
            for python in pythons:
                if (found := find_python(python)) is None:
                    raise WheelError(f"there is no Python {python}: install it, or name pairs without it")
                name = f"{tag_for(found, unpacked)}-{build.source_digest(schema.cpp_header())}"
                library = prebuilt / name / f"{build.MODULE}.so"
                if not build.is_intact(library):
                    compile_hook(found, unpacked, library)
                    if twice:
                        compare_with_another(found, unpacked, library)
                if missing := missing_symbols(library, unpacked, found):
                    raise WheelError(f"{name}: torch or Python lacks {', '.join(sorted(missing))}")
                print(f"{name}: {library.stat().st_size:,} bytes", flush=True)


def compare_with_another(python: str, torch: Path, library: Path) -> None:
    """Compile once more with torch in another folder, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        elsewhere = Path(folder, "elsewhere")
        shutil.copytree(torch, elsewhere / "torch", symlinks=True)
        other = Path(folder, "again", library.name)
        compile_hook(python, elsewhere / "torch", other)
        if other.read_bytes() != library.read_bytes():
            raise WheelError(f"{library.parent.name}: compiled twice, the bytes differ")


def inspect_hooks(prebuilt: Path) -> None:
    """Refuse hooks that are not fit for release.

    Raises:
        WheelError: with what is wrong.
    """
    wrong = [
        f"{library.parent.name}: {what}" for library in sorted(prebuilt.glob("*/*.so")) for what in problems(library)
    ]
    digest = build.source_digest(schema.cpp_header())
    wrong += [f"{folder.name}: of other sources" for folder in prebuilt.iterdir() if not folder.name.endswith(digest)]
    if wrong:
        raise WheelError("\n".join(wrong))


def run(*command: str, **variables: str) -> None:
    """Run a command with more variables; its output is not needed."""
    subprocess.run(command, cwd=REPOSITORY, env=os.environ | variables, check=True, stdout=subprocess.DEVNULL)


def make_packages(dist: Path, prebuilt: Path) -> list[Path]:
    """Make sdist and wheels; return them."""
    dist.mkdir(parents=True, exist_ok=True)
    for old in [*dist.glob("dtprof-*.whl"), *dist.glob("dtprof-*.tar.gz")]:
        old.unlink()
    with tempfile.TemporaryDirectory() as folder:
        tools = Path(folder, "tools")
        run(sys.executable, "-m", "venv", str(tools))
        run(str(tools / "bin/pip"), "install", "--quiet", "hatchling>=1.27", "wheel>=0.45")
        python = str(tools / "bin/python")
        run(python, "-m", "hatchling", "build", "-d", str(dist), SOURCE_DATE_EPOCH=EPOCH)
        (pure,) = dist.glob("dtprof-*-none-any.whl")
        run(python, "-m", "wheel", "unpack", "-d", folder, str(pure))
        (unpacked,) = Path(folder).glob("dtprof-*")
        for library in sorted(prebuilt.glob("*/*.so")):
            place = unpacked / "dtprof/capture/native/prebuilt" / library.parent.name
            place.mkdir(parents=True)
            for name in (library.name, build.CHECKSUM):
                shutil.copyfile(library.with_name(name), place / name)
        (about,) = unpacked.glob("*.dist-info/WHEEL")
        metadata = about.read_text(encoding="utf-8").replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        about.write_text(metadata.replace("Tag: py3-none-any", f"Tag: py3-none-{PLATFORM}"), encoding="utf-8")
        run(python, "-m", "wheel", "pack", "-d", str(dist), str(unpacked), SOURCE_DATE_EPOCH=EPOCH)
    return sorted([*dist.glob("dtprof-*.whl"), *dist.glob("dtprof-*.tar.gz")])


def main() -> int:
    """Build everything; 1 where something must not be released."""
    parser = argparse.ArgumentParser(prog=".ci/wheels.py", description=__doc__.splitlines()[0])
    released = [
        (python, torch) for torch in reversed(TORCHES) for python in PYTHONS if (python, torch) not in UNRELEASED
    ]
    every = [f"{python}:{torch}" for python, torch in released]
    parser.add_argument("pairs", nargs="*", default=every, metavar="PYTHON:TORCH", help=f"default: {' '.join(every)}")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "dist", help="where wheels and sdist go")
    parser.add_argument("--scratch", type=Path, default=REPOSITORY / ".make/hooks", help="where compiled hooks stay")
    parser.add_argument("--twice", action="store_true", help="compile every hook twice, and compare")
    given = parser.parse_args()
    prebuilt = given.scratch.resolve()
    prebuilt.mkdir(parents=True, exist_ok=True)
    digest = build.source_digest(schema.cpp_header())
    for old in prebuilt.iterdir():
        if not old.name.endswith(digest):
            shutil.rmtree(old)
    try:
        pairs = [(python, torch) for python, _, torch in (pair.partition(":") for pair in given.pairs)]
        make_hooks(pairs, prebuilt, twice=given.twice)
        inspect_hooks(prebuilt)
        packages = make_packages(given.folder.resolve(), prebuilt)
    except WheelError as error:
        print(error, file=sys.stderr)
        return 1
    for package in packages:
        size = package.stat().st_size
        print(f"{hashlib.sha256(package.read_bytes()).hexdigest()}  {size:>10,}  {package.name}")
        if size > LARGEST_WHEEL:
            print(f"{package.name} is larger than {LARGEST_WHEEL:,} bytes", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
