"""Fixtures of the tests of diagnosis."""

from pathlib import Path

import pytest

from dtprof.diagnosis.findings import Verdict
from dtprof.session.job_diagnosis import diagnose_logs
from tests.diagnosis.log_texts import Diagnose


@pytest.fixture
def diagnose_texts(tmp_path: Path) -> Diagnose:
    """Return the verdict on texts, each the content of one log of a job."""

    def of(*contents: str) -> Verdict:
        paths = [tmp_path / f"part-{'abcdefgh'[i]}.log" for i in range(len(contents))]
        for path, content in zip(paths, contents, strict=True):
            path.write_text(content, encoding="utf-8")
        return diagnose_logs(paths)

    return of
