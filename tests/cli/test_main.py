"""The command line as a whole: finding commands, errors as sentences, what belongs to the job."""

import argparse
import errno
import importlib
import importlib.util
import json
import os
import re
import sys
from pathlib import Path

import pytest

import dtprof
from dtprof.cli import demo
from dtprof.cli import main as command_line
from dtprof.cli import run as run_command
from dtprof.cli.main import COMMAND_GROUPS, COMMANDS, build_parser, main
from tests.analysis.noisy_runs import build_ranks
from tests.builders import write_run


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"dtprof {dtprof.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["check"], ["report", "a", "b"], ["run", "--nonsense", "--"]])
def test_what_cannot_be_understood_ends_with_2_and_the_usage(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("usage: dtprof")


def test_without_a_run_a_command_takes_the_newest_one_and_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, started_ns in (("second", 2 * 10**18), ("first", 10**18)):
        write_run(tmp_path / "dtprof-runs" / name, build_ranks(3), started_realtime_ns=started_ns)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for command in ("summary", "diagnose"):
        assert main([command, "--json"]) == 0
        said = capsys.readouterr()
        assert said.err.startswith("dtprof: the newest run, dtprof-runs/second\n")
        assert main([command, "--json", "dtprof-runs/second"]) == 0
        assert capsys.readouterr().out == said.out


@pytest.mark.parametrize("command", ["summary", "diagnose", "whatif"])
def test_without_a_run_where_there_is_none_a_command_says_how_to_record_one(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([command]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"dtprof {command}: no run was named, and dtprof-runs/ of this folder holds none; expected ")
    assert "dtprof run -- COMMAND" in said


def test_what_a_command_does_not_know_is_refused_in_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["check", "run", "--max-step", "3", "again"])
    said = capsys.readouterr().err
    assert said.startswith("usage: dtprof check ")
    assert said.endswith(
        "dtprof check: error: unrecognized arguments: --max-step 3 again; --max-step may mean --max-step-ms; "
        "see dtprof check --help\n"
    )


@pytest.mark.parametrize(
    ("arguments", "end"),
    [
        (["sumary", "run"], "; sumary may mean summary; see dtprof --help\n"),
        (["plan", "--steps", "5"], "unrecognized arguments: --steps 5; see dtprof plan --help\n"),
        (["sh", "train.sh"], "; to record sh: dtprof run -- sh; see dtprof --help\n"),
        (["export", "run", "--format", "perfeto"], "; perfeto may mean perfetto; see dtprof export --help\n"),
    ],
)
def test_a_mistyped_command_or_choice_names_the_one_that_is_meant(
    arguments: list[str], end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert capsys.readouterr().err.endswith(end)


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_every_command_shows_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([name, "--help"])
    assert ended.value.code == 0
    _, _, examples = re.split(r"^(examples?):$", capsys.readouterr().out, maxsplit=1, flags=re.MULTILINE)
    assert f"  dtprof {name}" in examples


def test_every_command_is_a_file_of_its_own() -> None:
    folder = Path(command_line.__file__).parent
    for name in COMMANDS:
        assert (folder / f"{name}.py").exists()
        assert importlib.import_module(f"dtprof.cli.{name}").__doc__.startswith(f"`dtprof {name}`: ")
    assert "start here" in build_parser().format_help()


def test_help_lists_every_command_once_under_its_group() -> None:
    help_text = build_parser().format_help()
    for title, commands in COMMAND_GROUPS.items():
        _, _, below = help_text.partition(f"\n{title}:\n")
        listed = re.findall(r"^  (\w+)  ", below.partition("\n\n")[0], re.MULTILINE)
        assert listed == list(commands)
    assert "positional arguments" not in help_text


@pytest.mark.parametrize(
    ("dashes", "job"),
    [
        (["--"], ["train.py", "--help"]),
        (["--"], ["x", "--", "-o", "theirs"]),
        (["--"], ["--version"]),
        (["--"], ["x", "--off", "--force"]),
        ([], ["torchrun", "--nproc-per-node", "2", "train.py", "--off", "-o", "theirs"]),
        ([], ["x", "--", "-o", "theirs"]),
    ],
)
def test_what_follows_the_dashes_or_the_first_word_belongs_to_the_job(
    monkeypatch: pytest.MonkeyPatch, dashes: list[str], job: list[str]
) -> None:
    seen = []
    monkeypatch.setattr(run_command, "run", lambda arguments: seen.append(arguments) or 0)
    assert main(["run", "-o", "mine", *dashes, *job]) == 0
    (arguments,) = seen
    assert (arguments.job, arguments.output, arguments.off, arguments.force) == (job, "mine", False, False)


def test_interrupt_ends_with_the_shells_status_and_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_command, "run", interrupted)
    assert main(["run", "--", "x"]) == 130
    assert capsys.readouterr().err == ""


def test_demo_without_torch_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else find(name))
    assert main(["demo", "-o", str(tmp_path / "demo")]) == 2
    assert capsys.readouterr().err == (
        "dtprof demo: the example trains a model and torch is not installed: pip install 'dtprof[train]'\n"
    )
    assert not (tmp_path / "demo").exists()


def test_a_full_disk_behind_stdout_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(run_command, "run", full)
    monkeypatch.setattr(sys, "stdout", sys.stdout)  # put back afterwards
    assert main(["run", "--", "x"]) == 2
    said = capsys.readouterr().err
    assert said == "dtprof run: stdout cannot be written to (No space left on device); send it where there is room\n"


def test_interrupt_while_commands_are_loaded_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> argparse.ArgumentParser:
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "build_parser", interrupted)
    assert main(["--help"]) == 130


def test_lint_of_a_folder_without_python_is_no_clean_bill(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lint", str(tmp_path)]) == 2
    assert f"{tmp_path} holds no Python file; expected" in capsys.readouterr().err


def test_inject_into_what_is_no_python_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inject", "status", "--python", "/bin/true"]) == 2
    assert "--python is '/bin/true', which runs, but not as Python" in capsys.readouterr().err


def test_import_replaces_runs_and_nothing_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "thesis.tex").write_text("years of work")
    assert main(["import", "traces", "-o", str(tmp_path), "--force"]) == 2
    assert "holds 'thesis.tex', which dtprof did not write" in capsys.readouterr().err
    assert (tmp_path / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("command", "forced"), [(["python", *demo.JOB], True), (["python", "train.py"], False), ("x", False), (None, False)]
)
def test_demo_replaces_the_run_of_an_earlier_demo_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: object, forced: bool
) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"command": command}))
    seen: list[argparse.Namespace] = []
    monkeypatch.setattr(run_command, "run", lambda arguments: seen.append(arguments) or 3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["demo", "-o", str(tmp_path)]) == 3
    assert [arguments.force for arguments in seen] == [forced]
    assert main(["demo", "-o", str(tmp_path), "--force"]) == 3
    assert seen[-1].force


def test_the_next_command_is_said_below_the_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a run", build_ranks(1))

    def said_by(*words: str) -> str:
        main([words[0], str(run), *words[1:]])
        return capsys.readouterr().err

    assert said_by("diagnose", "--jobs", "1") == f"next: dtprof summary '{run}'\n"
    assert said_by("check", "--max-step-ms", "0.001") == f"next: dtprof summary '{run}'\n"
    assert said_by("check", "--max-slowdown-against", str(run)) == f"next: dtprof summary '{run}'\n"
    assert said_by("top") == f"next: dtprof summary '{run}'\n"
    assert said_by("diagnose", "--json", "--jobs", "1") == ""
    source = tmp_path / "train.py"
    source.write_text("import torch.distributed as dist\nif dist.get_rank() == 0:\n    dist.barrier()\n")
    assert main(["lint", str(source)]) == 1
    assert capsys.readouterr().err == f"next: dtprof lint {source} --run RUN\n"
