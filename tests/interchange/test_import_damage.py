"""Damaged files of any format are refused with a sentence or give what they hold; never a traceback."""

import random
from pathlib import Path

import pytest

from tests.interchange import damage

TRIALS = 40


@pytest.mark.parametrize("kind", ["kineto", "host", "horovod", "xla", "xplane", "dump", "pickle", "parquet"])
def test_damage_gives_a_sentence_or_what_is_left(tmp_path: Path, kind: str) -> None:
    data = damage.samples(tmp_path)[kind]
    assert damage.try_one(data, tmp_path, whole=True) is None
    refused = []
    for seed in range(TRIALS):
        sentence = damage.try_one(damage.damaged(data, random.Random(seed)), tmp_path, whole=seed % 8 == 0)
        refused += [sentence] if sentence else []
    assert refused
    assert all(len(sentence) > 30 and sentence[0].isprintable() for sentence in refused)
