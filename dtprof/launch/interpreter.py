"""Find the Python interpreter of a command's ranks, and prepare the native hook for it."""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dtprof import settings, torch_versions
from dtprof.capture.native import build
from dtprof.records import schema

_PYTHON_NAME = re.compile(r"(python|pypy)[\d.]*[td]*(-\w+)?")
COMPILER_TIMEOUT_S = 300.0
"""Compiling takes some 20 s on a quiet machine, and took 71 s on a busy one."""
ANSWER_TIMEOUT_S = 60.0
"""How long an interpreter may take to start and locate torch."""


@dataclass(frozen=True, kw_only=True)
class HookChoice:
    """The hook that the job will use, and a message about it for the user."""

    library: str | None
    torch_version: str | None
    message: str | None


def find_interpreter(command: str) -> str:
    """Return the interpreter of a command: itself, that of its shebang line, else python3 on PATH."""
    path = shutil.which(command) or command
    if _PYTHON_NAME.fullmatch(Path(path).name):
        return path
    try:
        with Path(path).open("rb") as file:
            head = file.read(1024).decode("utf-8", "replace").splitlines()
    except OSError:
        head = []
    if head and head[0].startswith("#!"):
        # pip writes a second line of this form where the path is too long for a shebang.
        match = re.match(r"'''exec' \"?([^\"]+?)\"? \"\$0\"", head[1] if len(head) > 1 else "")
        words = [match[1]] if match else head[0][2:].split()
        for word in words:
            if _PYTHON_NAME.fullmatch(Path(word).name) and (found := shutil.which(word)):
                return found
    return shutil.which("python3") or shutil.which("python") or sys.executable


def choose_hook(command: str, *, native: bool, environment: dict[str, str], say: Callable[[str], None]) -> HookChoice:
    """Return the native hook for the command's interpreter, compiled if need be, or the reason why there is none."""
    interpreter = find_interpreter(command)
    answer = _ask(interpreter, environment, compile_s=0)
    torch = answer.get("torch")
    if torch is None:
        return HookChoice(
            library=None,
            torch_version=None,
            message=f"{answer.get('reason')} ({interpreter}): the job runs uninstrumented unless its ranks use another",
        )
    if torch_versions.is_too_old(torch):
        return HookChoice(library=None, torch_version=torch, message=torch_versions.refusal(torch))
    untested = None
    if torch_versions.is_untested(torch):
        newest = torch_versions.shown(torch_versions.NEWEST_TESTED)
        untested = f"torch {torch} is newer than {newest}, the newest tested: records may be incomplete"
    if not native:
        return HookChoice(
            library=None, torch_version=torch, message=_lines(untested, "using the Python hook, as asked")
        )
    if answer.get("library") is None and answer.get("reason") is None:
        answer = _compile(interpreter, environment, torch, say)
    library = answer.get("library")
    reason = None if library else f"{answer.get('reason')}: using the Python hook (15 to 30 us more per operation)"
    return HookChoice(library=library, torch_version=torch, message=_lines(untested, reason))


def _lines(*texts: str | None) -> str | None:
    return "\n".join(filter(None, texts)) or None


def _compile(
    interpreter: str, environment: dict[str, str], torch: str, say: Callable[[str], None]
) -> dict[str, str | None]:
    """Compile the hook with progress messages; return the build script's answer."""
    say(f"compiling the native hook for torch {torch} (once per torch version, about 20 s) ...")
    done = threading.Event()
    reporter = threading.Thread(target=_report_progress, args=(done, say), daemon=True)
    reporter.start()
    try:
        return _ask(interpreter, environment, compile_s=COMPILER_TIMEOUT_S)
    finally:
        done.set()
        reporter.join()


def _report_progress(done: threading.Event, say: Callable[[str], None]) -> None:
    waited = 0
    while not done.wait(10):
        waited += 10
        say(f"still compiling, {waited} s ...")


def _ask(interpreter: str, environment: dict[str, str], *, compile_s: float) -> dict[str, str | None]:
    """Run the build script under the job's interpreter and return its answer; it may compile for `compile_s`."""
    with tempfile.TemporaryDirectory() as folder:
        header = Path(folder, "schema.h")
        header.write_text(schema.cpp_header(), encoding="utf-8")
        command = [interpreter, str(Path(build.__file__)), str(header), f"{compile_s:g}"]
        try:
            result = subprocess.run(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=ANSWER_TIMEOUT_S + 2 * compile_s,  # another process may compile first
                check=False,
            )
            lines = result.stdout.splitlines() or result.stderr.splitlines() or ["no answer"]
            answer = json.loads(lines[-1])
        except ValueError:
            return {"library": None, "torch": None, "reason": f"could not be asked for torch: {lines[-1]}"}
        except subprocess.TimeoutExpired as error:
            reason = f"could not be asked for torch: no answer in {error.timeout:g} s"
            return {"library": None, "torch": None, "reason": reason}
        except OSError as error:
            return {"library": None, "torch": None, "reason": f"could not be asked for torch: {error}"}
    return answer if isinstance(answer, dict) else {"library": None, "torch": None, "reason": "no answer"}


def bootstrap_folder() -> Path:
    """Return the folder whose `sitecustomize` starts dtprof in a process."""
    return Path(build.__file__).resolve().parents[1] / "bootstrap"


def injected_path(python_path: str) -> str:
    """Return a PYTHONPATH with the bootstrap folder first."""
    return os.pathsep.join(filter(None, [str(bootstrap_folder()), python_path]))


TORCH_SETTINGS = {"TORCH_NCCL_ENABLE_TIMING": "1"}
"""Variables set for the job unless it has them. They change nothing that it computes: NCCL's back end times the
begin of each kernel, for capture/native/nccl_events.cpp."""


def given_to_torch() -> dict[str, str]:
    """Return the variables of torch that dtprof sets for the job."""
    return {name: value for name, value in TORCH_SETTINGS.items() if name not in os.environ}


def job_environment(*, run: Path, hook: HookChoice) -> dict[str, str]:
    """Return the environment of the job: that of this process, with the bootstrap folder first on PYTHONPATH."""
    environment = given_to_torch() | os.environ
    environment["PYTHONPATH"] = injected_path(environment.get("PYTHONPATH", ""))
    environment[settings.ENV_RUN_DIR] = str(run)
    environment[settings.ENV_NATIVE_HOOK] = hook.library or ""
    environment[settings.ENV_WATCHER_PID] = str(os.getpid())
    return environment
