"""Versions of torch: too old, tested, newer, unknown."""

from importlib import metadata

import pytest

from dtprof import torch_versions


@pytest.mark.parametrize(
    ("version", "too_old", "untested"),
    [
        ("1.13.1", True, False),
        ("2.5.1+cu124", True, False),
        ("2.6.0", False, False),
        ("2.10.0+cu128", False, False),
        ("2.13.0+cpu", False, False),
        ("2.13.9", False, False),
        ("2.15.0a0+git1234567", False, False),
        ("2.16.0a0+git1234567", False, True),
        ("2.100.0", False, True),
        ("3.0.0", False, True),
        ("nightly", False, True),
        ("", False, True),
    ],
)
def test_version_is_judged_by_its_first_two_numbers(version: str, too_old: bool, untested: bool) -> None:
    assert torch_versions.is_too_old(version) == too_old
    assert torch_versions.is_untested(version) == untested


def test_the_torch_of_these_tests_is_one_that_the_table_has() -> None:
    try:
        installed = metadata.version("torch")
    except metadata.PackageNotFoundError:
        pytest.skip("needs torch")
    assert not torch_versions.is_too_old(installed)
    assert not torch_versions.is_untested(installed), "raise NEWEST_TESTED: these tests now run with a newer torch"
