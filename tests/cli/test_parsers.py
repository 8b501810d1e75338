"""Options as they are typed: what may be given once."""

import pytest

from dtprof.cli.main import main


@pytest.mark.parametrize("option", ["--network", "--ranks", "--schedule"])
def test_a_change_given_twice_is_an_error_that_names_both(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["whatif", "run", option, "2", option, "3"])
    assert ended.value.code == 2
    assert f"{option} was given as 2 and as 3; expected one" in capsys.readouterr().err
