"""Options as they are typed, and help as it is read."""

import pytest

from dtprof.cli.main import main


@pytest.mark.parametrize("option", ["--network", "--ranks", "--schedule"])
def test_a_change_given_twice_is_an_error_that_names_both(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["whatif", "run", option, "2", option, "3"])
    assert ended.value.code == 2
    assert f"{option} was given as 2 and as 3; expected one" in capsys.readouterr().err


def test_help_wraps_its_prose_and_leaves_examples_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main(["compare", "--help"])
    printed = capsys.readouterr().out
    example = """  dtprof compare runs/before runs/after --json | jq '.changes[] | select(.verdict == "larger")'"""
    assert [line for line in printed.splitlines() if len(line) > 80] == [example]
    assert "\nexit status: 0 compared" in printed
