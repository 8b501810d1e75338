"""Compile the simulated accelerator before the first test that needs it."""

import os

import pytest

from tests.accelerator.compiled_device import NoCompilerError, ensure_library


@pytest.fixture(scope="session", autouse=True)
def compiled_device() -> None:
    """Compile it, or skip where there is no compiler; a gate must not skip."""
    try:
        ensure_library()
    except NoCompilerError as missing:
        if os.environ.get("CI"):
            pytest.fail(f"{missing}, and CI is set")
        pytest.skip(str(missing))
