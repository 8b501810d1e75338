"""How dtprof comes into the processes of a job, by each of its ways, and what it leaves as it was."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from dtprof import settings
from dtprof.errors import OutputError, UsageError
from dtprof.launch import announcement, injection, interpreter
from dtprof.records import writer
from dtprof.records.reader import open_run
from tests import jobs

BOOTSTRAP = Path(interpreter.__file__).parents[1] / "capture" / "bootstrap"
FAKE_TORCH = "import os, sys; print('torch', __spec__.loader.__class__.__name__, sys.argv[1:])\n"


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Give the interpreter of a new virtual environment, with nothing in it."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    return tmp_path / "venv" / "bin" / "python"


@pytest.fixture
def jobs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a folder of announced jobs apart from the one of this machine."""
    monkeypatch.setattr(settings, "JOBS_FOLDER", f"{tmp_path}/jobs-%d")
    return tmp_path / f"jobs-{os.getuid()}"


def run_python(
    folder: Path, program: str, *options: str, env: dict[str, str] | None = None, python: str = sys.executable
) -> str:
    """Run a program where `torch` is a module that prints, and a run directory is named; return its output."""
    (folder / "torch.py").write_text(FAKE_TORCH)
    given = {"PYTHONPATH": f"{BOOTSTRAP}:{folder}", "DTPROF_RUN_DIR": str(folder), "PATH": os.environ["PATH"]}
    result = subprocess.run(
        [python, *options, "-c", program], env=given | (env or {}), capture_output=True, text=True, check=True
    )
    return result.stdout + result.stderr


PATCHED = "import dtprof_start; dtprof_start.arm = lambda: print('armed'); import importlib.util, sys\n"


def test_a_program_that_looks_for_torch_before_it_imports_it_is_armed_all_the_same(tmp_path: Path) -> None:
    program = PATCHED + "for _ in range(3): assert importlib.util.find_spec('torch').origin\nimport torch"
    assert run_python(tmp_path, program) == "torch SourceFileLoader []\narmed\n"


def test_a_program_that_asks_how_torch_would_be_loaded_gets_its_own_loaders_answer(tmp_path: Path) -> None:
    program = PATCHED + "print(importlib.util.find_spec('torch').loader.get_filename('torch'))"
    assert run_python(tmp_path, program) == f"{tmp_path}/torch.py\n"


def test_torch_that_fails_to_import_may_be_imported_again(tmp_path: Path) -> None:
    program = PATCHED + (
        "from pathlib import Path\n"
        f"file = Path({str(tmp_path)!r}, 'torch.py'); file.write_text('raise ImportError')\n"
        "try: import torch\nexcept ImportError: print('failed')\n"
        "file.write_text('value = 12345'); importlib.invalidate_caches()\nimport torch; print(torch.value)"
    )
    assert run_python(tmp_path, program, "-B") == "failed\narmed\n12345\n"
    assert not (tmp_path / "torch.pyc").exists()


def test_without_a_run_nothing_waits_for_torch(tmp_path: Path) -> None:
    program = "import sys; print([f for f in sys.meta_path if 'AfterTorch' in repr(f)]); import torch"
    assert run_python(tmp_path, program, env={"DTPROF_RUN_DIR": ""}) == "[]\ntorch SourceFileLoader []\n"


def test_users_sitecustomize_before_ours_hides_it_and_the_pth_file_does_not_need_it(tmp_path: Path, venv: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "sitecustomize.py").write_text("print('theirs')")
    path = {"PYTHONPATH": f"{theirs}:{BOOTSTRAP}:{tmp_path}"}
    program = "import sys; print('dtprof_start' in sys.modules)"
    assert run_python(tmp_path, program, env=path) == "theirs\nFalse\n"
    injection.install(str(venv))
    assert run_python(tmp_path, program, env=path, python=str(venv)) == "theirs\nTrue\n"


def test_users_sitecustomize_after_ours_runs_once_and_its_errors_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('theirs'); import sys; sys.mine = 1")
    assert run_python(tmp_path, PATCHED + "print(sys.mine); import torch").splitlines() == [
        "theirs",
        "1",
        "torch SourceFileLoader []",
        "armed",
    ]
    (tmp_path / "sitecustomize.py").write_text("raise ValueError('theirs')")
    said = run_python(tmp_path, PATCHED + "import torch")
    assert "Error in sitecustomize" in said
    assert "ValueError: theirs" in said
    assert "armed" in said


def test_installing_looking_and_removing(venv: Path) -> None:
    python = str(venv)
    assert injection.inspect(python).start is None
    installed = injection.install(python)
    assert (installed.start, installed.is_current) == (str(BOOTSTRAP / "dtprof_start.py"), True)
    module = installed.site_packages / injection.MODULE
    module.write_text(module.read_text().replace(str(BOOTSTRAP), "/opt/elsewhere"))
    assert injection.inspect(python).start == "/opt/elsewhere/dtprof_start.py"
    assert not injection.inspect(python).is_current
    gone = subprocess.run([python, "-c", "print('ran')"], capture_output=True, env={"DTPROF_RUN_DIR": "/x"}, check=True)
    assert (gone.stdout, gone.stderr) == (b"ran\n", b""), "a dtprof that was moved away is not missed"
    assert injection.install(python).is_current, "installed over an older one"
    injection.remove(python)
    assert injection.inspect(python).start is None
    assert not list(installed.site_packages.glob("*dtprof*"))
    injection.remove(python)


def test_file_of_somebody_else_is_left_alone(venv: Path) -> None:
    module = injection.inspect(str(venv)).site_packages / injection.MODULE
    module.write_text("print('mine')")
    for act in (injection.install, injection.remove):
        with pytest.raises(OutputError, match="was not written by dtprof and is left alone"):
            act(str(venv))
    assert module.read_text() == "print('mine')"


@pytest.mark.parametrize("python", ["/bin/false", "no-such-python"])
def test_what_is_no_python_is_refused(python: str) -> None:
    with pytest.raises(UsageError, match="does not run as Python"):
        injection.inspect(python)


def test_process_with_a_cleared_environment_finds_the_job_of_its_ancestor(jobs_folder: Path) -> None:
    file = announcement.announce({"DTPROF_RUN_DIR": "/run", "DTPROF_NATIVE_TAP": "/tap.so", "HOME": "/root"})
    assert file is not None
    child = "import sys; sys.path.insert(0, sys.argv[1]); import dtprof_start as s; s.JOBS_FOLDER = sys.argv[2]\n"
    child += "print(sorted(s.find_job().items()))"
    grandchild = ["sh", "-c", 'env -i "$@"; true', "sh", sys.executable, "-I", "-c", child]
    result = subprocess.run([*grandchild, str(BOOTSTRAP), settings.JOBS_FOLDER], capture_output=True, text=True)
    assert result.stdout == "[('DTPROF_NATIVE_TAP', '/tap.so'), ('DTPROF_RUN_DIR', '/run')]\n", result.stderr
    start = start_module()
    start.JOBS_FOLDER = settings.JOBS_FOLDER
    assert start.find_job() == {}, "this process is the launcher, and not of its job"
    announcement.withdraw(file)
    assert not jobs_folder.exists()
    result = subprocess.run([*grandchild, str(BOOTSTRAP), settings.JOBS_FOLDER], capture_output=True, text=True)
    assert result.stdout == "[]\n"


def test_folder_that_others_may_write_to_is_not_believed(jobs_folder: Path) -> None:
    assert announcement.announce({"DTPROF_RUN_DIR": "/run"}) is not None
    jobs_folder.chmod(0o777)
    assert announcement.announce({"DTPROF_RUN_DIR": "/run"}) is None
    start = start_module()
    start.JOBS_FOLDER = settings.JOBS_FOLDER
    assert start.find_job() == {}


def test_words_of_launchers_that_were_killed_are_forgotten(jobs_folder: Path) -> None:
    jobs_folder.mkdir(mode=0o700)
    dead = [jobs_folder / f"{2**22 + 1}-5.json", jobs_folder / f"{os.getppid()}-1.json", jobs_folder / "rubbish"]
    alive = jobs_folder / f"{os.getppid()}-{writer.start_ticks(os.getppid())}.json"
    for file in [*dead, alive]:
        file.write_text("{}")
    file = announcement.announce({})
    assert file is not None
    assert set(jobs_folder.iterdir()) == {alive, file}
    announcement.withdraw(file)
    assert set(jobs_folder.iterdir()) == {alive}, "the folder stays while another job runs"


def test_both_sides_mean_the_same_folder() -> None:
    assert start_module().JOBS_FOLDER == settings.JOBS_FOLDER


def start_module() -> ModuleType:
    """Return a fresh copy of the module that processes of a job start with."""
    spec = importlib.util.spec_from_file_location("dtprof_start_copy", BOOTSTRAP / "dtprof_start.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ANOTHER_ENVIRONMENT = """
import subprocess, sys
program, *options = sys.argv[1:]
command = [sys.executable, *options, program, "10"]
print(subprocess.run(command, env={}, check=True, capture_output=True).stdout.decode())
"""


@pytest.mark.jobs
def test_ranks_of_another_virtual_environment_with_a_cleared_environment_are_recorded(
    tmp_path: Path, venv: Path
) -> None:
    """The environment has torch and not dtprof; ranks are isolated: without PYTHONPATH and our variables."""
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    assert torch.origin is not None
    site_packages = injection.inspect(str(venv)).site_packages
    (site_packages / "torch.pth").write_text(f"{Path(torch.origin).parents[1]}\n")
    lacks = "import torch, importlib.util as u; assert not getattr(u.find_spec('dtprof'), 'origin', None)"
    subprocess.run([str(venv), "-c", lacks], check=True, cwd=tmp_path)
    program = str(jobs.PROGRAMS / "many_operations.py")
    run = tmp_path / "by-path"
    job = jobs.recorded(run, [str(venv), program, "10"])
    assert len(open_run(run).load(0).operations) == 10, "PYTHONPATH reaches it, cleared environments apart"
    command = [str(venv), "-c", ANOTHER_ENVIRONMENT, program, "-I"]
    jobs.recorded(tmp_path / "unreached", command)
    assert open_run(tmp_path / "unreached").ranks == []
    installed = jobs.finished([*jobs.DTPROF, "inject", "install", "--python", str(venv)], tmp_path)
    assert installed.stdout == f"installed in {site_packages}\n"
    job = jobs.recorded(tmp_path / "by-pth", command)
    assert job.stdout == "computed 10\n\n"
    tables = open_run(tmp_path / "by-pth").load(0)
    assert (len(tables.operations), tables.hook, tables.closed) == (10, "native", True)
    removed = jobs.finished([*jobs.DTPROF, "inject", "remove", "--python", str(venv), "--json"], tmp_path)
    assert json.loads(removed.stdout)["installed"] is False
    status = jobs.finished([*jobs.DTPROF, "inject", "status", "--python", str(venv)], tmp_path)
    assert (status.process.returncode, status.stdout) == (1, f"not installed in {site_packages}\n")
