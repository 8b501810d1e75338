"""What a program sees of its own errors and warnings is what it sees without dtprof."""

from pathlib import Path

import pytest

from tests import raised_errors

pytestmark = pytest.mark.jobs


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Run the program alone."""
    return raised_errors.raise_bare(tmp_path_factory.mktemp("bare"))


@pytest.mark.parametrize(
    "options", [(), pytest.param(("--no-native",), marks=pytest.mark.thorough)], ids=["native", "python"]
)
def test_tracebacks_and_warnings_are_as_without_dtprof(
    tmp_path: Path, bare: list[str], options: tuple[str, ...]
) -> None:
    assert raised_errors.raise_recorded(tmp_path / "run", *options) == bare
