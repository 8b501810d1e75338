"""Install, remove and inspect the `.pth` file that starts dtprof where PYTHONPATH does not reach."""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from dtprof import launchers, settings
from dtprof.errors import OutputError, UsageError
from dtprof.launch import interpreter
from dtprof.records import writer

PTH = "dtprof_inject.pth"
MODULE = "_dtprof_inject.py"
SIGNATURE = "Written by `dtprof inject install`"
ASK_TIMEOUT_S = 60
_TEXT = '''\
"""{ours}, taken away by `dtprof inject remove`: starts dtprof in jobs of `dtprof run`, and where a store is named
here or in DTPROF_ALWAYS in every torch job; else it does nothing."""

START = {start!r}
STORE = {store!r}
PYTHON = {python!r}
LAUNCHERS = {launchers!r}
RANKS = {ranks!r}


def _program(argv):
    rest = iter(argv[1:])
    for word in rest:
        if word == "-m":
            return next(rest, "")
        if word == "-c" or not word.startswith("-"):
            return "" if word == "-c" else word.rpartition("/")[2]
        if word in ("-W", "-X", "--check-hash-based-pycs"):
            next(rest, "")
    return ""


def _start():
    import os
    import sys

    if "dtprof_start" in sys.modules:
        return
    named = any(os.environ.get("DTPROF_" + name) for name in ("RUN_DIR", "STEP_CLOCK", "PROBE_DIR"))
    store = "" if named else os.environ.get("DTPROF_ALWAYS") or STORE
    program = _program(sys.orig_argv) if store else ""
    is_launcher = program in LAUNCHERS
    is_job = store and program != "dtprof" and (is_launcher or any(name in os.environ for name in RANKS))
    if not (named or is_job or os.path.isdir({folder!r} % os.getuid())):
        return
    from importlib.machinery import SourceFileLoader

    module = type(os)("dtprof_start")
    module.__file__ = START
    SourceFileLoader("dtprof_start", START).exec_module(module)
    sys.modules["dtprof_start"] = module
    module.wait_for_torch_of_ancestors_job()
    if is_job:
        module.record_always(store, PYTHON, is_launcher)


try:
    _start()
except Exception:
    pass  # dtprof was moved or removed: no job of anybody's is to notice
'''


@dataclass(frozen=True, kw_only=True)
class Installation:
    """The injection in an interpreter's site-packages."""

    site_packages: Path
    start: str | None  # the file that it starts; None: nothing is installed
    store: str = ""  # where every torch job is recorded; empty: only those of `dtprof run`
    is_current: bool  # this dtprof wrote it


def inspect(python: str) -> Installation:
    """Return the installation in an interpreter.

    Raises:
        UsageError: the interpreter cannot be run.
        OutputError: a file of the same name is not of dtprof.
    """
    site_packages = _site_packages(python)
    module, pth = site_packages / MODULE, site_packages / PTH
    text = _installed_text(module)
    start = next((line.partition(" = ")[2].strip("'\"") for line in text.splitlines() if line.startswith("START")), "")
    store = next((line.partition(" = ")[2].strip("'\"") for line in text.splitlines() if line.startswith("STORE")), "")
    return Installation(
        site_packages=site_packages,
        start=start if pth.exists() and start else None,
        store=store if pth.exists() else "",
        is_current=pth.exists() and text == _text(store),
    )


def install(python: str, *, store: str = "") -> Installation:
    """Write both files, over those of an older dtprof.

    Parameters:
        store: folder into which every torch job is recorded; empty: those of `dtprof run` alone.

    Raises:
        UsageError, OutputError: as for `inspect`; or site-packages cannot be written to.
    """
    installed = inspect(python)
    try:
        writer.write_whole(installed.site_packages / MODULE, _text(store).encode())
        writer.write_whole(installed.site_packages / PTH, b"import _dtprof_inject\n")
    except OSError as error:
        raise _not_writable(installed.site_packages, error) from error
    return inspect(python)


def remove(python: str) -> Installation:
    """Remove both files.

    Raises:
        UsageError, OutputError: as for `install`.
    """
    installed = inspect(python)
    try:
        for name in (PTH, MODULE):  # in this order: a .pth without its module is an error at every start
            (installed.site_packages / name).unlink(missing_ok=True)
    except OSError as error:
        raise _not_writable(installed.site_packages, error) from error
    return installed


def _text(store: str) -> str:
    return _TEXT.format(
        ours=SIGNATURE,
        start=str(interpreter.bootstrap_folder() / "dtprof_start.py"),
        folder=settings.JOBS_FOLDER,
        store=store,
        python=sys.executable,
        launchers=launchers.recorded_launchers(),
        ranks=launchers.RANKS,
    )


def _installed_text(module: Path) -> str:
    try:
        text = module.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise OutputError(f"{module} cannot be read ({error}); it should be a file that dtprof wrote") from error
    if SIGNATURE not in text:
        raise OutputError(f"{module} was not written by dtprof and is left alone; move it away first")
    return text


def _site_packages(python: str) -> Path:
    program = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    try:
        result = subprocess.run(
            [python, "-I", "-c", program], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(
            f"--python is {python!r}, which does not run as Python ({error}); give an interpreter"
        ) from error
    lines = result.stdout.splitlines()
    if not lines or not Path(lines[-1]).is_absolute():
        raise UsageError(f"--python is {python!r}, which runs, but not as Python; give an interpreter")
    return Path(lines[-1])


def _not_writable(folder: Path, error: OSError) -> OutputError:
    return OutputError(
        f"{folder} cannot be written to ({error.strerror}); use a virtual environment, or put `import dtprof.auto` "
        "first into the program"
    )
