"""Machines and environments that lack something: the job runs, and one line says what is not recorded."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dtprof import __version__
from dtprof.capture.native import build, loader
from dtprof.records import schema
from dtprof.records.reader import open_run
from tests import jobs

pytestmark = pytest.mark.jobs
MANY = str(jobs.PROGRAMS / "many_operations.py")


def lines(job: jobs.Job) -> list[str]:
    """Return what dtprof said, the closing lines left out."""
    said = [line.removeprefix("dtprof: ") for line in job.stderr.splitlines() if line.startswith("dtprof: ")]
    return [line for line in said if not line.startswith(("run kept in", "next: "))]


@pytest.mark.parametrize("cached", ["nothing", "a damaged hook"])
def test_without_compiler_the_job_runs_with_the_python_hook(tmp_path: Path, cached: str) -> None:
    cache = tmp_path / "cache"
    if cached == "a damaged hook":
        shutil.copytree(build.cache_folder(), cache)
        for library in cache.rglob("*.so"):
            library.write_bytes(library.read_bytes()[: library.stat().st_size // 2])
    env = {"DTPROF_CACHE_DIR": str(cache), "PATH": str(tmp_path), "CXX": ""}
    job = jobs.recorded(tmp_path / "run", [sys.executable, MANY, "10"], env=env)
    assert job.stdout == "computed 10\n"
    (why,) = lines(job)
    assert why == (
        "no C++ compiler was found (install g++, or set CXX): using the Python hook (15 to 30 us more per operation)"
    )
    tables = open_run(tmp_path / "run").load(0)
    assert (tables.hook, len(tables.operations)) == ("python", 10)


def test_hook_damaged_after_the_launch_is_not_loaded_by_the_ranks(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    shutil.copytree(build.cache_folder(), cache)
    damage = tmp_path / "damage.sh"
    damage.write_text(f'#!/bin/sh\nfor f in {cache}/native/*/*.so; do truncate -s 100000 "$f"; done\nexec "$@"\n')
    damage.chmod(0o755)
    env = {"DTPROF_CACHE_DIR": str(cache), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    job = jobs.recorded(tmp_path / "run", [str(damage), sys.executable, MANY, "10"], env=env)
    assert job.stdout == "computed 10\n"
    (why,) = lines(job)
    assert why.startswith("the native hook /")
    assert why.endswith(" is damaged: using the Python hook (15 to 30 us more per operation)")
    tables = open_run(tmp_path / "run").load(0)
    assert (tables.hook, len(tables.operations)) == ("python", 10)
    assert tables.notes == (why,), "the run says why its operations cost more"


@pytest.mark.parametrize("status", [0, 7])
def test_without_torch_the_job_runs_uninstrumented(tmp_path: Path, status: int) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    job = jobs.recorded(tmp_path / "run", [str(python), "-c", f"print('ran'); exit({status})"], status=status)
    assert job.stdout == "ran\n"
    first, second = lines(job)
    assert first == f"torch is not installed ({python}): the job runs uninstrumented unless its ranks use another"
    assert second.startswith("no rank was recorded (no Python process with torch was reached")
    assert open_run(tmp_path / "run").manifest.notes == (first,)


def test_torch_that_is_too_old_is_said_once(tmp_path: Path) -> None:
    module = tmp_path / "imports" / "torch" / "__init__.py"
    module.parent.mkdir(parents=True)
    module.write_text("from torch.version import __version__\n")
    module.with_name("version.py").write_text("__version__ = '2.5.1+cpu'\n")
    command = [sys.executable, "-c", "import torch; print(torch.__version__)"]
    job = jobs.recorded(tmp_path / "run", command, env={"PYTHONPATH": str(module.parents[1])})
    assert job.stdout == "2.5.1+cpu\n"
    assert lines(job) == ["torch 2.5.1+cpu is older than 2.6, the oldest supported: the job runs uninstrumented"]


def test_without_injection_the_job_runs_and_the_reason_is_guessed(tmp_path: Path) -> None:
    job = jobs.recorded(tmp_path / "run", [sys.executable, "-E", MANY, "10"])
    assert job.stdout == "computed 10\n"
    (why,) = lines(job)
    assert "`dtprof inject install` beforehand reaches one started with -E" in why
    assert open_run(tmp_path / "run").ranks == []


def test_torch_that_is_only_imported_makes_no_rank(tmp_path: Path) -> None:
    job = jobs.recorded(tmp_path / "run", [sys.executable, "-c", "import torch; print(torch.ones(1).item())"])
    assert job.stdout == "1.0\n"
    assert lines(job) == [
        "no rank was recorded (torch was imported, but no process joined a group, ran a backward pass or an "
        "optimizer step)"
    ]


def test_launcher_with_the_rank_of_its_node_is_no_rank_where_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As operators of Kubernetes set it in each pod.
    monkeypatch.setenv("RANK", "5")
    monkeypatch.setenv("WORLD_SIZE", "8")
    program = tmp_path / "train.py"
    program.write_text("import torch; raise ValueError('at once')")
    jobs.recorded(tmp_path / "run", jobs.torchrun(1, program), status=1)
    run = open_run(tmp_path / "run")
    assert run.ranks == [0]


def test_hook_of_another_dtprof_is_not_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tag = build.binary_tag("2.13.0")
    monkeypatch.setenv("DTPROF_NATIVE_TAP", str(tmp_path / f"{tag}-0123456789abcdef" / "dtprof_native_hook.so"))
    module, why = loader.load("2.13.0")
    assert module is None
    digest = build.source_digest(schema.cpp_header())
    assert why == (
        f"the native hook was compiled for {tag}-0123456789abcdef, this process runs {tag}-{digest}: "
        "using the Python hook (15 to 30 us more per operation)"
    )


def test_dtprof_of_another_version_in_a_rank_is_named(tmp_path: Path) -> None:
    package = tmp_path / "other" / "dtprof"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text('__version__ = "0.0.7"\n')
    program = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r}); import dtprof, torch; print(dtprof.__version__)"
    )
    job = jobs.recorded(tmp_path / "run", [sys.executable, "-c", program])
    assert job.stdout == "0.0.7\n"
    said = next(line for line in lines(job) if "has imported dtprof" in line)
    assert said.endswith(
        f"has imported dtprof 0.0.7 ({package}/__init__.py), dtprof {__version__} started the job: install one version"
    )


def test_loader_opens_only_what_fits_this_very_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DTPROF_NATIVE_TAP", raising=False)
    assert loader.load("2.13.0") == (None, "")
    other = tmp_path / "2.12.0-cpython-311-abc" / "dtprof_native_hook.so"
    monkeypatch.setenv("DTPROF_NATIVE_TAP", str(other))
    module, why = loader.load("2.13.0")
    assert module is None
    assert why.startswith("the native hook was compiled for 2.12.0-cpython-311-abc, this process runs 2.13.0-")
    digest = build.source_digest(schema.cpp_header())
    gone = tmp_path / f"{build.binary_tag('2.13.0')}-{digest}" / "dtprof_native_hook.so"
    monkeypatch.setenv("DTPROF_NATIVE_TAP", str(gone))
    assert loader.load("2.13.0") == (
        None,
        f"the native hook {gone} is damaged: using the Python hook (15 to 30 us more per operation)",
    )
