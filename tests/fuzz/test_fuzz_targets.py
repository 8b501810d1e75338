"""Every reader that is fuzzed survives its seeds and a few damaged ones; many are tried by `python -m tests.fuzz`."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz.mutations import mutated
from tests.fuzz.targets import TARGETS
from tests.jobs import REPOSITORY

INPUTS = 40


def changed_bytes(data: bytes, max_bytes: int) -> bytes:
    """Change some bytes: what libFuzzer does when it is there."""
    chance = random.Random(len(data))
    damaged = bytearray(data or b"\0")
    for _ in range(chance.choice((1, 4, 16))):
        at = chance.randrange(len(damaged))
        damaged[at : at + chance.randrange(2)] = bytes([chance.randrange(256)]) * chance.randrange(3)
        damaged = damaged or bytearray(1)
    return bytes(damaged[:max_bytes])


@pytest.mark.parametrize("name", TARGETS)
def test_a_reader_survives_damage_to_what_it_reads(name: str, tmp_path: Path) -> None:
    target = TARGETS[name]
    seeds = target.seeds(tmp_path)
    check = target.check(tmp_path)
    assert check(seeds[0])
    for seed in seeds[1:]:
        check(seed)
    chance = random.Random(7)
    for number in range(INPUTS):
        check(mutated(chance.choice(seeds), target.max_bytes, number, changed_bytes))


def test_comparing_arrays_under_the_fuzzer_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    atheris = pytest.importorskip("atheris")
    from tests.fuzz import comparisons

    def compare() -> int:
        rows = np.arange(100)
        return int((rows >= 90).sum()) if sys.argv != [""] else 0

    monkeypatch.setattr(atheris, "_trace_cmp", atheris._trace_cmp)  # which is put back
    watched = atheris.instrument_func(compare)
    comparisons.pass_arrays_by()
    before = sys.getallocatedblocks()
    found = {watched() for _ in range(1000)}
    kept = sys.getallocatedblocks() - before
    assert found == {10}
    assert kept < 500


def test_inputs_that_reach_new_branches_are_kept(tmp_path: Path) -> None:
    pytest.importorskip("atheris")
    options = ("horovod", "--inputs", "300", "--keep", str(tmp_path))
    ran = subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *options],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert "300 inputs, " in ran.stderr
    kept = [file for file in tmp_path.iterdir() if not file.name.startswith("seed-")]
    assert len(kept) > 5
