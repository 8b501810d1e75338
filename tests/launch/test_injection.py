"""How dtprof comes into the processes of a job, by each of its ways, and what it leaves as it was."""

import os
import subprocess
import sys
from pathlib import Path

from dtprof.launch import interpreter

BOOTSTRAP = Path(interpreter.__file__).parents[1] / "capture" / "bootstrap"
FAKE_TORCH = "import os, sys; print('torch', __spec__.loader.__class__.__name__, sys.argv[1:])\n"


def run_python(folder: Path, program: str, *options: str, env: dict[str, str] | None = None) -> str:
    """Run a program where `torch` is a module that prints, and a run directory is named; return its output."""
    (folder / "torch.py").write_text(FAKE_TORCH)
    given = {"PYTHONPATH": f"{BOOTSTRAP}:{folder}", "DTPROF_RUN_DIR": str(folder), "PATH": os.environ["PATH"]}
    result = subprocess.run(
        [sys.executable, *options, "-c", program], env=given | (env or {}), capture_output=True, text=True, check=True
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
