"""Frames of the user's own code are told from those of what it uses, on any host."""

from pathlib import Path

import pytest

import dtprof
from dtprof.records.user_files import is_user_file


@pytest.mark.parametrize(
    "path",
    [
        "/home/me/train.py",
        "/usr/local/app/train.py",
        "/home/me/torch/models/llama.py",
        "/home/me/dtprof/train.py",
        "/home/me/dtprof/reference_trainer/loop.py",
    ],
)
def test_a_program_is_the_users_wherever_it_lies(path: str) -> None:
    assert is_user_file(path)


@pytest.mark.parametrize(
    "path",
    [
        "/opt/venv/lib/python3.12/site-packages/torch/nn/modules/module.py",
        "/usr/lib/python3/dist-packages/numpy/__init__.py",
        "/usr/lib64/python3.11/threading.py",
        "/home/me/pytorch/torch/distributed/distributed_c10d.py",
        "/another/checkout/dtprof/dtprof/capture/phases.py",
        "/another/checkout/dtprof/records/writer.py",
        "/another/checkout/dtprof/marks.py",
        "/opt/venv/bin/torchrun",
        "/usr/lib/libc.so.6",
        "<frozen importlib._bootstrap>",
    ],
)
def test_installed_code_torch_and_dtprof_of_any_checkout_are_not(path: str) -> None:
    assert not is_user_file(path)


def test_every_module_of_dtprof_beside_its_folders_is_not() -> None:
    modules = [file.name for file in Path(dtprof.__file__).parent.glob("*.py") if not file.name.startswith("__")]
    assert [name for name in modules if is_user_file(f"/another/checkout/dtprof/{name}")] == []
