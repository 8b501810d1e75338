"""What a run writes to, looked at on every rank before any has joined; free of torch."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path

from reference_trainer.errors import UsageError


def refuse_unwritable_file(path: Path) -> None:
    """Refuse a metrics file that cannot be created."""
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--metrics {path}: cannot be written; give a file in a folder that exists and is writable")


def refuse_content(path: Path) -> None:
    """Refuse a metrics file whose earlier lines would be lost."""
    if path.is_file() and path.stat().st_size > 0:
        raise UsageError(f"--metrics {path}: the file has content, which is never overwritten; give a new name")


def prepare_scalars(folder: Path | None) -> None:
    """Make the folder for TensorBoard, where one is given; refuse it where the package is missing."""
    if folder is None:
        return
    if find_spec("tensorboard") is None:
        raise UsageError(
            "--tensorboard needs the package tensorboard, which is not installed; run pip install tensorboard, "
            "or leave --tensorboard out"
        )
    make_folder("--tensorboard", folder)


def make_folder(flag: str, path: Path) -> None:
    """Make a folder, unless it is there; refuse one that cannot be made, or that nothing can be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise UsageError(
            f"{flag} {path}: no folder that can be written to ({error.strerror}); give another one"
        ) from error
