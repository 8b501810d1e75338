"""Run tests/gpu, several at a time: each test is a figure, kept as soon as it has ended."""

import os
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.figures import Figure, emit
from benchmarks.gpu.placement import KEPT

CORES_PER_TEST = 4
"""A test runs up to 4 ranks; what is tested here are counts, verdicts and times measured twice, not costs."""


class Outcomes:
    """Print how each test ended."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print the test, after its call, or where its set-up failed or skipped it."""
        if report.when != "call" and report.outcome == "passed":
            return
        text = "" if report.passed else str(report.longrepr)[-1500:]
        name = report.nodeid.removeprefix("tests/gpu/") + ("" if report.when == "call" else f" ({report.when})")
        emit(
            Figure(name=name, value=report.duration, unit="s", goal="passes", met=report.outcome == "passed", note=text)
        )


def main() -> int:
    """Return the exit status of pytest."""
    # Of the plugins and warnings of whatever else is installed there, none matters here.
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    plugins = ["-p", "pytest_timeout", "-p", "xdist.plugin", "-p", "no:cacheprovider"]
    options = ["--timeout", "150", "-n", str(max(1, (os.cpu_count() or 1) // CORES_PER_TEST))]
    if kept := os.environ.get(KEPT):
        options += ["--basetemp", str(Path(kept, "tests"))]
    arguments = ["-q", "-m", "gpu", "-W", "default", *plugins, *options, "tests/gpu"]
    return int(pytest.main(arguments, plugins=[Outcomes()]))


if __name__ == "__main__":
    sys.exit(main())
