"""Run tests/gpu: each test is a figure, kept as soon as it has ended."""

import os
import sys

import pytest

from benchmarks.gpu.figures import Figure, emit


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
    plugins = ["-p", "pytest_timeout", "-p", "no:cacheprovider"]
    arguments = ["-q", "-m", "gpu", "-W", "default", *plugins, "--timeout", "150", "tests/gpu"]
    return int(pytest.main(arguments, plugins=[Outcomes()]))


if __name__ == "__main__":
    sys.exit(main())
