"""A GPU that this build of torch cannot use is said to be there."""

from pathlib import Path

import pytest
import torch

from dtprof.capture import arm
from dtprof.capture.native import build


@pytest.mark.parametrize(
    ("has_driver", "cuda", "words"),
    [
        (True, None, "is built without CUDA: the NVIDIA GPUs of this machine are not used"),
        (False, None, ""),
        (True, "13.0", ""),
    ],
)
def test_torch_without_cuda_beside_a_driver_is_a_note(
    has_driver: bool, cuda: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = tmp_path / "nvidiactl"
    if has_driver:
        driver.touch()
    monkeypatch.setattr(build, "NVIDIA_DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    note = arm.find_unusable_gpu()
    assert words in note if words and note else note is None
