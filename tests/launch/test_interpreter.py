"""Which interpreter a command will use, and which hook fits it."""

import fcntl
import importlib.util
import os
import sys
from pathlib import Path

import psutil
import pytest

from dtprof.capture.native import build
from dtprof.launch import interpreter
from dtprof.launch.interpreter import choose_hook, find_interpreter
from dtprof.records import schema


def executable(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder that is the whole PATH and holds a python3."""
    executable(tmp_path / "python3", "#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", ["python", "python3", "python3.12", "python3.13t", "python3.11-dbg", "pypy3"])
def test_a_python_is_its_own_interpreter(folder: Path, name: str) -> None:
    python = executable(folder / "elsewhere" / name, "#!/bin/sh\n")
    assert find_interpreter(str(python)) == str(python)


def test_a_python_is_found_on_the_path(folder: Path) -> None:
    assert find_interpreter("python3") == str(folder / "python3")


@pytest.mark.parametrize(
    "shebang", ["#!{python}", "#!{python} -u", "#! {python}", "#!/bin/sh\n'''exec' \"{python}\" \"$0\" \"$@\"\n' '''"]
)
def test_a_script_has_the_interpreter_of_its_first_lines(folder: Path, shebang: str) -> None:
    python = executable(folder / "a venv" / "bin" / "python3.11", "#!/bin/sh\n")
    if "exec" not in shebang:
        python = executable(folder / "venv" / "bin" / "python3.11", "#!/bin/sh\n")
    script = executable(folder / "torchrun", shebang.format(python=python) + "\nimport torch\n")
    assert find_interpreter(str(script)) == str(python)
    assert find_interpreter("torchrun") == str(python)


@pytest.mark.parametrize("shebang", ["#!/usr/bin/env python3", "#!/usr/bin/env -S python3 -u"])
def test_env_in_a_shebang_searches_the_path(folder: Path, shebang: str) -> None:
    script = executable(folder / "train.py", f"{shebang}\n")
    assert find_interpreter(str(script)) == str(folder / "python3")


@pytest.mark.parametrize(
    "content", ["#!/bin/bash\nexec python3 x.py\n", "\x7fELF\x00\x01", "", "#!", "#!/no/such/python3\n"]
)
def test_anything_else_is_taken_to_use_python3_of_the_path(folder: Path, content: str) -> None:
    script = executable(folder / "srun", content)
    assert find_interpreter(str(script)) == str(folder / "python3")
    assert find_interpreter("env") == str(folder / "python3")


def test_without_any_python_our_own_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_interpreter("mpirun") == sys.executable


def fake_compiler(path: Path, does: str) -> Path:
    """Write a compiler that counts its calls and then does this; $out is the file it is asked for."""
    lines = ["#!/bin/sh", f"echo x >> {path}.calls", 'while [ "$1" != -o ]; do shift; done', "out=$2", does]
    return executable(path, "\n".join(lines) + "\n")


def num_calls(compiler: Path) -> int:
    calls = Path(f"{compiler}.calls")
    return len(calls.read_text().splitlines()) if calls.exists() else 0


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an empty cache folder."""
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    folder = tmp_path / "cache"
    monkeypatch.setenv("DTPROF_CACHE_DIR", str(folder))
    return folder


def choose(monkeypatch: pytest.MonkeyPatch, compiler: Path | None) -> tuple[interpreter.HookChoice, list[str]]:
    """Choose a hook for this interpreter; return what was said meanwhile."""
    said: list[str] = []
    if compiler is None:
        monkeypatch.setenv("PATH", "")
        monkeypatch.delenv("CXX", raising=False)
    else:
        monkeypatch.setenv("CXX", str(compiler))
    chosen = choose_hook(sys.executable, native=True, environment=dict(os.environ), say=said.append)
    return chosen, said


def test_hook_is_compiled_once_and_then_found(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fake_compiler(tmp_path / "g++", "echo library > $out")
    chosen, said = choose(monkeypatch, compiler)
    assert chosen.message is None
    assert chosen.library is not None
    assert Path(chosen.library).is_relative_to(cache)
    assert [line.split(" for")[0] for line in said] == ["compiling the native hook"]
    again, said = choose(monkeypatch, compiler)
    assert (again.library, said) == (chosen.library, [])
    assert num_calls(compiler) == 1
    assert sorted(path.name for path in Path(chosen.library).parent.iterdir()) == [
        "dtprof_native_hook.so",
        "lock",
        "sha256",
    ]


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("damage", ["cut", "changed", "no checksum"])
def test_damaged_hook_in_the_cache_is_compiled_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    compiler = fake_compiler(tmp_path / "g++", "echo library > $out")
    library = Path(choose(monkeypatch, compiler)[0].library or "")
    if damage == "cut":
        library.write_bytes(library.read_bytes()[:3])
    elif damage == "changed":
        library.write_bytes(library.read_bytes()[::-1])
    else:
        library.with_name(build.CHECKSUM).unlink()
    assert not build.is_intact(library)
    chosen, _ = choose(monkeypatch, compiler)
    assert chosen.library == str(library)
    assert num_calls(compiler) == 2
    assert build.is_intact(library)


@pytest.mark.usefixtures("cache")
def test_without_compiler_the_python_hook_is_used_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, said = choose(monkeypatch, None)
    assert (chosen.library, said) == (None, [])
    assert chosen.message == (
        "no C++ compiler was found (install g++, or set CXX): using the Python hook (15 to 30 us more per operation)"
    )


def test_failing_compiler_leaves_its_output_and_the_python_hook(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_compiler(tmp_path / "g++", "echo no such header >&2; exit 4")
    chosen, _ = choose(monkeypatch, compiler)
    assert chosen.library is None
    assert chosen.message is not None
    assert "failed with exit status 4; its output is in" in chosen.message
    log = next(cache.rglob("build.log"))
    assert str(log) in chosen.message
    assert log.read_text().endswith("no such header\n")


@pytest.mark.usefixtures("cache")
def test_compiler_that_takes_too_long_is_ended_with_all_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = tmp_path / "started"
    compiler = fake_compiler(tmp_path / "g++", f"sleep 1000 & echo $! > {started}; wait")
    for seconds in (1, 10, 100):  # until it has begun in that time
        monkeypatch.setattr(interpreter, "COMPILER_TIMEOUT_S", float(seconds))
        chosen, _ = choose(monkeypatch, compiler)
        if started.exists() and started.read_text():
            break
    late = f"{compiler} did not finish in {seconds} s: using the Python hook (15 to 30 us more per operation)"
    assert (chosen.library, chosen.message) == (None, late)
    try:
        sleeping = psutil.Process(int(started.read_text()))
        assert sleeping.status() == psutil.STATUS_ZOMBIE or sleeping.wait(30) is None
    except psutil.NoSuchProcess:
        pass  # it is gone


def test_lock_that_another_process_holds_is_not_waited_for_without_end(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_compiler(tmp_path / "g++", "echo library > $out")
    library = Path(choose(monkeypatch, compiler)[0].library or "")
    library.unlink()
    monkeypatch.setattr(interpreter, "COMPILER_TIMEOUT_S", 1.0)
    with library.with_name("lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        chosen, _ = choose(monkeypatch, compiler)
    assert library.is_relative_to(cache)
    assert chosen.library is None
    assert chosen.message is not None
    assert chosen.message.startswith(f"another process has held {library.with_name('lock')} for 1 s: using the Python")


@pytest.mark.usefixtures("cache")
def test_library_of_nccl_is_compiled_once_its_headers_have_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = fake_compiler(tmp_path / "g++", "echo library > $out")
    monkeypatch.setenv("CXX", str(compiler))
    torch = tmp_path / "site" / "torch"
    for file in ("lib/libtorch_cuda.so", "include/torch/library.h"):
        (torch / file).parent.mkdir(parents=True)
        (torch / file).touch()
    monkeypatch.setattr(build, "find_torch", lambda: (torch, "2.11.0"))
    monkeypatch.setattr(build, "NCCL_HEADERS", ("test_of_nccl.h",))

    def ensure(timeout_s: float = 60) -> Path | None:
        library = build.ensure("", timeout_s=timeout_s)["library"]
        return Path(library) if library else None

    hook = ensure()
    assert hook is not None
    reason = hook.with_name(build.NCCL_REASON)
    assert reason.read_text().startswith("test_of_nccl.h was not found beside torch")
    assert "pip install nvidia-cuda-crt" in reason.read_text()
    assert (ensure(timeout_s=0), num_calls(compiler)) == (hook, 1)  # nothing has changed: nothing is compiled

    headers = tmp_path / "elsewhere" / "nvidia" / "cu13" / "include"  # a package of another folder on Python's path
    headers.mkdir(parents=True)
    (headers / "test_of_nccl.h").touch()
    monkeypatch.syspath_prepend(tmp_path / "elsewhere")
    assert ensure(timeout_s=0) is None  # to be compiled
    assert (ensure(), num_calls(compiler)) == (hook, 2)
    assert build.is_intact(hook.with_name(build.NCCL_LIBRARY), build.NCCL_CHECKSUM)
    assert not reason.exists()
    assert (ensure(timeout_s=0), num_calls(compiler)) == (hook, 2)


@pytest.mark.usefixtures("cache")
def test_library_of_nccl_that_cannot_be_compiled_is_tried_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = fake_compiler(tmp_path / "g++", 'case "$*" in *nccl_events*) exit 1 ;; esac; echo library > $out')
    monkeypatch.setenv("CXX", str(compiler))
    torch = tmp_path / "site" / "torch"
    for file in ("lib/libtorch_cuda.so", "include/torch/library.h"):
        (torch / file).parent.mkdir(parents=True)
        (torch / file).touch()
    monkeypatch.setattr(build, "find_torch", lambda: (torch, "2.11.0"))
    monkeypatch.setattr(build, "NCCL_HEADERS", ())
    for _ in range(3):
        assert build.ensure("", timeout_s=60)["library"] is not None
    assert num_calls(compiler) == 2


def test_user_without_a_home_folder_gets_the_python_hook(monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    for name in ("HOME", "XDG_CACHE_HOME", "DTPROF_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    answer = build.ensure(schema.cpp_header(), timeout_s=0)
    assert answer["library"] is None
    assert answer["torch"] is not None
    assert answer["reason"] == "there is no home folder for the compiled hook (set DTPROF_CACHE_DIR)"


def test_cache_that_cannot_be_written_to_leaves_the_python_hook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    cache.write_text("a file")
    chosen, _ = choose(monkeypatch, fake_compiler(tmp_path / "g++", "echo library > $out"))
    assert chosen.library is None
    assert chosen.message is not None
    assert chosen.message.startswith(f"the cache folder {cache}/native/")
    assert "cannot be used: Not a directory: using the Python hook" in chosen.message


def test_hook_of_another_source_or_torch_has_another_place() -> None:
    header = schema.cpp_header()
    places = {build.library_path("2.13.0", header), build.library_path("2.12.0", header)}
    places.add(build.library_path("2.13.0", header + "//"))
    assert len(places) == 3


def answer_with(monkeypatch: pytest.MonkeyPatch, **answer: str | None) -> None:
    reply = {"library": None, "torch": None, "reason": None} | answer
    monkeypatch.setattr(interpreter, "_ask", lambda *_, **__: reply)


def test_torch_newer_than_any_tested_is_recorded_and_said_to_be_new(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, torch="9.1.0+cu200", library="/cache/tap.so")
    chosen = choose_hook("/usr/bin/python3", native=True, environment={}, say=lambda _: None)
    assert chosen.library == "/cache/tap.so"
    said = "torch 9.1.0+cu200 is newer than 2.15, the newest tested: records may be incomplete"
    assert chosen.message == said
    chosen = choose_hook("/usr/bin/python3", native=False, environment={}, say=lambda _: None)
    assert chosen.message == f"{said}\nusing the Python hook, as asked"


@pytest.mark.usefixtures("cache")
def test_newer_torch_gets_a_hook_compiled_for_exactly_that_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "newer" / "torch"
    real = importlib.util.find_spec("torch")
    assert real is not None
    assert real.origin is not None
    package.mkdir(parents=True)
    for name in ("__init__.py", "include", "lib"):
        (package / name).symlink_to(Path(real.origin).parent / name)
    (package / "version.py").write_text("__version__ = '9.1.0'\n")
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    compiler = fake_compiler(tmp_path / "g++", 'echo "$all" > $out')
    compiler.write_text(compiler.read_text().replace("#!/bin/sh\n", '#!/bin/sh\nall="$*"\n'))
    chosen, _ = choose(monkeypatch, compiler)
    assert chosen.torch_version == "9.1.0"
    assert chosen.library is not None
    assert Path(chosen.library).parent.name.startswith("9.1.0-")
    assert f"-I{package}/include" in Path(chosen.library).read_text()
    assert "newer than" in (chosen.message or "")


def test_interpreter_without_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_with(monkeypatch, reason="torch is not installed")
    chosen = choose_hook("/usr/bin/python3", native=True, environment={}, say=lambda _: None)
    assert (chosen.library, chosen.torch_version) == (None, None)
    assert chosen.message == (
        "torch is not installed (/usr/bin/python3): the job runs uninstrumented unless its ranks use another"
    )


@pytest.mark.parametrize(("version", "old"), [("2.5.1+cpu", True), ("1.13", True), ("2.6.0", False), ("3.0a1", False)])
def test_torch_older_than_supported_runs_uninstrumented(
    monkeypatch: pytest.MonkeyPatch, version: str, old: bool
) -> None:
    answer_with(monkeypatch, torch=version, library="/x.so")
    chosen = choose_hook("python3", native=True, environment={}, say=lambda _: None)
    assert (chosen.library is None) == old
    if old:
        assert chosen.message == f"torch {version} is older than 2.6, the oldest supported: the job runs uninstrumented"


def test_program_that_answers_nonsense_is_quoted(folder: Path) -> None:
    python = executable(folder / "other" / "python3", "#!/bin/sh\necho no module named json >&2\nexit 1\n")
    chosen = choose_hook(str(python), native=True, environment=dict(os.environ), say=lambda _: None)
    assert chosen.library is None
    assert chosen.message is not None
    assert "no module named json" in chosen.message
    assert str(python) in chosen.message


def test_injection_comes_first_and_keeps_the_users_path(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hook = interpreter.HookChoice(library="/tap.so", torch_version="2.13.0", message=None)
    monkeypatch.setenv("PYTHONPATH", "/mine:/yours")
    environment = interpreter.job_environment(run=tmp_path, hook=hook)
    first, *rest = environment["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "sitecustomize.py").exists()
    assert rest == ["/mine", "/yours"]
    assert (environment["DTPROF_RUN_DIR"], environment["DTPROF_NATIVE_TAP"]) == (str(tmp_path), "/tap.so")
    monkeypatch.delenv("PYTHONPATH")
    assert interpreter.job_environment(run=tmp_path, hook=hook)["PYTHONPATH"] == first
