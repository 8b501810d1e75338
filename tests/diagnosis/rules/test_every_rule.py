"""Every rule file has a faulty job for each of its kinds and a sound one like it, and tells them apart by itself."""

from importlib import import_module
from typing import Any

import pytest

from dtprof.diagnosis.rules import BY_FILE, ORDER
from tests.diagnosis.judging import found_by


def kinds_of(file: str) -> set[str]:
    return {kind for declared in BY_FILE[file] for kind in declared.kinds}


def module_of(file: str) -> Any:
    return import_module(f"tests.diagnosis.rules.test_{file}")


@pytest.mark.parametrize("file", ORDER)
def test_rule_finds_the_fault_in_the_faulty_jobs_and_nothing_in_the_sound_one_like_them(file: str) -> None:
    tests = module_of(file)
    for kind, build in tests.FAULTY.items():
        found = found_by(file, build())
        assert kind in {finding.kind for finding in found}
        assert {finding.kind for finding in found} <= kinds_of(file)
    assert found_by(file, tests.SOUND()) == []


@pytest.mark.parametrize("file", ORDER)
def test_every_kind_of_a_rule_has_a_faulty_job(file: str) -> None:
    assert set(module_of(file).FAULTY) == kinds_of(file)
