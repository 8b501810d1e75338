"""The simulated device behaves as a GPU does, and does what it was told to the ns."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.jobs


def test_device_keeps_its_promises() -> None:
    checks = Path(__file__).with_name("device_checks.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(checks)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stdout + ran.stderr
