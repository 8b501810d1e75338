"""python -m tests.stress.sanitizers [address] [thread]: the native hook under AddressSanitizer and ThreadSanitizer.

The hook alone is compiled with the sanitizer; torch and Python are as released. So ThreadSanitizer does not see the
atomic counters of torch's smart pointers, and reports races in torch's own destructors, with and without dtprof. What
counts is a report whose access lies in dtprof's source. A library with a known mistake shows first that reports arrive.
Exit status 1 where a report concerns dtprof, the job fails, or an operation is missing.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from dtprof.capture.native import build
from dtprof.launch import interpreter
from dtprof.launch.interpreter import HookChoice
from dtprof.records import schema
from dtprof.records.reader import open_run
from tests.programs.threaded_collectives import ROUNDS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".make" / "sanitizers"
PROGRAM = ROOT / "tests" / "programs" / "threaded_collectives.py"
TIMEOUT_S = 1800.0
RUNTIMES = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    "address": ("ASAN_OPTIONS", "detect_leaks=0:halt_on_error=0"),
    "thread": ("TSAN_OPTIONS", "halt_on_error=0:exitcode=0:report_signal_unsafe=0"),
}
MISTAKES = {
    "address": 'extern "C" int mistake() { char* p = new char[8]; delete[] p; return p[1]; }',
    "thread": "#include <thread>\n"
    'int n; extern "C" int mistake() { std::thread t([] { n++; }); n++; t.join(); return n; }',
}
LEAST_OPERATIONS = 2 * 4 * (ROUNDS + ROUNDS // 10)
"""Of both ranks in four threads; training and messages come on top."""


def compiled_hook(kind: str) -> Path:
    """Return the hook compiled with a sanitizer, where the loader expects one for this torch."""
    found = build.find_torch()
    assert found is not None, "torch is not installed"
    torch_folder, version = found
    library = FOLDER / kind / build.library_path(version, schema.cpp_header()).relative_to(build.cache_folder())
    if not build.is_intact(library):
        library.parent.mkdir(parents=True, exist_ok=True)
        flags = [f"-fsanitize={kind}", "-fno-omit-frame-pointer", "-g1"]
        build.compile_hook(torch_folder, schema.cpp_header(), library, TIMEOUT_S, flags)
    return library


def compiled_mistake(kind: str) -> Path:
    """Return a library with a mistake that the sanitizer must report."""
    source, library = FOLDER / kind / "mistake.cpp", FOLDER / kind / "mistake.so"
    source.write_text(MISTAKES[kind], encoding="utf-8")
    command = [
        build.compiler(),
        f"-fsanitize={kind}",
        "-g1",
        "-O0",
        "-shared",
        "-fPIC",
        str(source),
        "-o",
        str(library),
    ]
    subprocess.run(command, check=True)
    return library


def environment_of(kind: str, reports: Path) -> dict[str, str]:
    """Return the variables that load the sanitizer into Python and send its reports to files."""
    asked = [build.compiler(), f"-print-file-name={RUNTIMES[kind]}"]
    runtime = Path(subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()).resolve()
    variable, options = OPTIONS[kind]
    return {"LD_PRELOAD": str(runtime), variable: f"{options}:log_path={reports / 'report'}"}


def reports_in(folder: Path) -> list[str]:
    """Return the reports of a folder."""
    text = "\n".join(path.read_text(errors="replace") for path in sorted(folder.glob("report*")))
    return re.findall(r"(?:WARNING: ThreadSanitizer|ERROR: AddressSanitizer).*?SUMMARY: [^\n]*", text, re.DOTALL)


def concerns(report: str, source: str) -> bool:
    """Say whether an access of a report lies in a source: in its first frame beyond the sanitizer's own runtime."""
    stacks = re.findall(r"(?:^    #\d+ [^\n]*\n?)+", report, re.MULTILINE)
    accesses = stacks[: 2 if "ThreadSanitizer" in report else 1]
    frames = [[line for line in stack.splitlines() if "libsanitizer" not in line] for stack in accesses]
    return any(source in stack[0] for stack in frames if stack)


def check(kind: str) -> list[str]:
    """Run a mistake and the program under a sanitizer; return what is wrong."""
    library = compiled_hook(kind)
    run, reports, control = (FOLDER / kind / name for name in ("run", "reports", "control"))
    for folder in (run, reports, control):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    # ThreadSanitizer of gcc 12 needs addresses that are not chosen at random.
    fixed = ["setarch", "-R"] if kind == "thread" else []
    mistake = [sys.executable, "-c", f"import ctypes; ctypes.CDLL({str(compiled_mistake(kind))!r}).mistake()"]
    subprocess.run([*fixed, *mistake], env=os.environ | environment_of(kind, control), timeout=TIMEOUT_S, check=False)
    if not any(concerns(report, "mistake") for report in reports_in(control)):
        return [f"{kind}: the known mistake was not reported"]

    hook = HookChoice(library=str(library), torch_version=None, message=None)
    environment = interpreter.job_environment(run=run, hook=hook) | environment_of(kind, reports)
    job = [*fixed, sys.executable, str(PROGRAM), str(run / "store")]
    done = subprocess.run(job, env=environment, timeout=TIMEOUT_S, check=False)
    found = reports_in(reports)
    own = [report for report in found if concerns(report, "dtprof/capture/native/")]
    opened = open_run(run)
    tables = [opened.load(rank) for rank in opened.ranks]
    operations = sum(len(table.operations) for table in tables)
    native = all(table.hook == "native" for table in tables)
    print(f"{kind}: {operations:,} operations, {len(found)} reports, {len(own)} of them in dtprof", flush=True)
    wrong = [f"{kind}: {report}" for report in own]
    if done.returncode:
        wrong.append(f"{kind}: the program ended with {done.returncode}")
    if operations < LEAST_OPERATIONS or not native:
        wrong.append(f"{kind}: {operations} operations, native hook: {native}; expected {LEAST_OPERATIONS} at least")
    return wrong


def main() -> int:
    """Check what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.sanitizers")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(RUNTIMES)} (default: both)")
    kinds = parser.parse_args().kinds
    for kind in sorted({*kinds} - {*RUNTIMES}):
        parser.error(f"unknown sanitizer {kind!r}; expected some of: {', '.join(RUNTIMES)}")
    wrong = [mistake for kind in kinds or RUNTIMES for mistake in check(kind)]
    print(*wrong, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
