"""Record this process without `dtprof run`: `import dtprof.auto`, as the first line of a program.

The ranks that one launcher started on this host share one run: DTPROF_OUTPUT, else one below dtprof-runs/. Under
`dtprof run` the import changes nothing. Such a job has no watcher: no hang detection, no samples of the node, no exit
status. An error here is one line on stderr.
"""

import contextlib
import fcntl
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from dtprof import __version__, fence, settings
from dtprof.errors import OutputError
from dtprof.launch import always_on
from dtprof.records import paths, schema, writer

NOTE = "recorded by `import dtprof.auto`: no launcher watched the job, and how it ended is not known"
START = Path(__file__).parent / "capture" / "bootstrap" / "dtprof_start.py"


@fence.fenced("this process", "is not recorded")
def record() -> None:
    """Arm this process: for its job of `dtprof run`, else for a run that the ranks of this host share."""
    if settings.is_switched_on(settings.ENV_OFF):
        return
    start = _load_start()
    start.wait_for_torch_of_ancestors_job()
    if start.waiting:
        return
    try:
        run, is_new = join_run()
    except OutputError as error:
        # All ranks of this host fail alike, and where the disk is full no file can tell that one has said so.
        if os.environ.get("LOCAL_RANK", "0") == "0" and multiprocessing.parent_process() is None:
            fence.warn_once(f"this job is not recorded: {error}")
        return
    os.environ[settings.ENV_RUN_DIR] = str(run)
    if settings.ENV_NATIVE_HOOK not in os.environ:
        os.environ[settings.ENV_NATIVE_HOOK] = _compiled_hook()
    if is_new:
        print(f"dtprof: recording into {os.path.relpath(run)}", file=sys.stderr, flush=True)
    start.wait_for_torch()


def _load_start() -> ModuleType:
    """Return the module `dtprof_start`, loaded as `sitecustomize` loads it."""
    if "dtprof_start" not in sys.modules:
        spec = importlib.util.spec_from_file_location("dtprof_start", START)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["dtprof_start"] = module
        spec.loader.exec_module(module)
    return sys.modules["dtprof_start"]


def join_run() -> tuple[Path, bool]:
    """Return the run of this job on this host, and whether this process has just created it.

    Raises:
        OutputError: it cannot be written.
    """
    job, output = _job(), settings.from_environment(settings.OUTPUT)
    program = re.sub(r"[^A-Za-z0-9._-]", "_", Path(sys.argv[0] or "python").stem) or "python"
    parent = (Path(output).parent if output else always_on.runs_folder()).absolute()
    name = Path(output).name if output else f"{time.strftime('%Y%m%d-%H%M%S')}-{program}"
    suffix = name if output else f"-{program}"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _locked(parent):
            runs = sorted(path for path in parent.iterdir() if re.sub(r"-\d+$", "", path.name).endswith(suffix))
            for run in reversed(runs):
                if _job_of(run) == list(job):
                    return run, False
            run = next(path for path in _numbered(parent / name) if not path.exists() or _is_empty(path))
            _create(run, job)
    except OSError as error:
        raise OutputError(f"{parent} cannot be written to ({error.strerror}); give another in DTPROF_OUTPUT") from error
    return run, True


def _create(run: Path, job: tuple[int, int, str]) -> None:
    """Create a run, or nothing."""
    run.mkdir(exist_ok=True)
    try:
        writer.write_json(run / paths.MANIFEST, _manifest(job))
    except OSError:
        with contextlib.suppress(OSError):
            run.rmdir()
        raise


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one rank at a time search for the run and create it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: ranks may create two runs
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _numbered(path: Path) -> Iterator[Path]:
    yield path
    for number in itertools.count(2):
        yield path.with_name(f"{path.name}-{number}")


def _is_empty(path: Path) -> bool:
    return path.is_dir() and not any(path.iterdir())


def _job() -> tuple[int, int, str]:
    """Return the identity of the job on this host: pid and start of the process that started its ranks, and boot id."""
    pid = os.getppid() if "RANK" in os.environ else os.getpid()
    return pid, _load_start().parent_and_start(pid)[1], writer.boot_id()


def _job_of(run: Path) -> object:
    """Return the identity of the job that a run belongs to; None where `import dtprof.auto` did not create it."""
    try:
        document = json.loads((run / paths.MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document.get("started_by") if isinstance(document, dict) else None


def _manifest(job: tuple[int, int, str]) -> dict[str, object]:
    return {
        "format_version": schema.FORMAT_VERSION,
        "dtprof_version": __version__,
        "command": list(sys.orig_argv),
        "cwd": str(Path.cwd()),
        "settings": {},
        "environment": {},
        "hosts": [writer.host_name()],
        "machine": {"cpus": os.cpu_count(), "platform": sys.platform},
        "boot_id": writer.boot_id(),
        "started_realtime_ns": time.time_ns(),
        "started_monotonic_ns": time.clock_gettime_ns(time.CLOCK_MONOTONIC),
        "ended_realtime_ns": 0,
        "exit_status": None,
        "started_by": list(job),
        "notes": [NOTE],
    }


def _compiled_hook() -> str:
    """Return the compiled hook from the cache of `dtprof run`; a rank compiles none."""
    from dtprof.capture.native import build

    return build.ensure(schema.cpp_header(), timeout_s=0)["library"] or ""


record()
