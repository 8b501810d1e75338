"""`dtprof completion`: what a shell completes with its script."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dtprof.cli.main import COMMANDS, main

ASK = """
source "$1"
COMP_WORDS=("${@:2}"); COMP_CWORD=$(($# - 2))
"$(complete -p dtprof | sed 's/.*-F \\([^ ]*\\).*/\\1/')" dtprof "${COMP_WORDS[-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "dtprof.bash"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as out:
        patch.setattr("sys.stdout", out)
        assert main(["completion", "bash"]) == 0
    return path


def completed(script: Path, folder: Path, *words: str) -> set[str]:
    command = ["bash", "--norc", "-c", ASK, "bash", str(script), "dtprof", *words]
    return set(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_choices_and_paths(script: Path, tmp_path: Path) -> None:
    (tmp_path / "a-run").mkdir()
    assert completed(script, tmp_path, "") >= set(COMMANDS)
    assert completed(script, tmp_path, "summ") == {"summary"}
    assert completed(script, tmp_path, "diagnose", "--js") == {"--json"}
    assert completed(script, tmp_path, "completion", "z") == {"zsh"}
    assert completed(script, tmp_path, "summary", "a-") == {"a-run"}


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_get_a_script_of_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert [command for command in COMMANDS if command not in script] == []
