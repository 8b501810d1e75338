"""The comparison with other tools: which ones are run."""

import pytest

from benchmarks.other_tools import __main__ as other_tools


def test_without_a_name_every_tool_is_run_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert other_tools.arguments([]).tools == list(other_tools.TOOLS)
    assert other_tools.arguments(["hta", "tb"]).tools == ["hta", "tb"]
    with pytest.raises(SystemExit):
        other_tools.arguments(["nsight"])
    assert "nsight is none of dtprof, hta" in capsys.readouterr().err
