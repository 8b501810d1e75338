import os
import re
import shlex
from pathlib import Path

import pytest

from reference_trainer import outputs
from reference_trainer.errors import UsageError
from reference_trainer.options import Options, parse_options
from reference_trainer.outputs import prepare_scalars
from reference_trainer.placement import Placement, read_placement

README = Path(__file__).parents[2] / "reference_trainer" / "README.md"


def parse(*arguments: str, world_size: int = 1) -> Options:
    return parse_options(arguments, Placement(world_size=world_size))


def test_preset_fills_what_the_command_line_leaves_out() -> None:
    options = parse("--preset", "tiny", "--steps", "7", world_size=4)
    assert (options.steps, options.batch_size, options.layout.dp, options.precision) == (7, 24, 4, "fp32")
    assert options.microbatch_size == 6
    assert options.tokens_per_step == 24 * 160


def test_tiny_and_small_presets_divide_by_the_usual_numbers_of_ranks() -> None:
    for preset in ("tiny", "small", "gpu"):
        for world_size in (1, 2, 3, 4, 6, 8):
            assert parse("--preset", preset, world_size=world_size).microbatch_size >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dp", "2"], "--dp 2, but the launcher started 4 rank(s); leave --dp out, or start with torchrun"),
        (
            ["--batch-size", "6"],
            "--batch-size 6 does not divide by --dp 4 x --accumulate 1 = 4; give a multiple of 4, such as 8",
        ),
        (["--accumulate", "5"], "--accumulate 5 = 20; give a multiple of 20, such as 40"),
        (["--accumulate", "0"], "--accumulate is 0; give a whole number from 1 on"),
        (["--steps", "0"], "--steps is 0"),
        (["--batch-size", "-4"], "--batch-size is -4"),
        (["--sequence-length", "0"], "--sequence-length is 0"),
        (["--learning-rate", "nan"], "--learning-rate is nan; give a number above 0"),
        (["--learning-rate", "-1"], "--learning-rate is -1.0"),
        (["--seed", "-1"], "--seed is -1"),
        (["--steps", "many"], "argument --steps: invalid int value: 'many'; see python -m reference_trainer --help"),
        (["--precision", "fp16"], "invalid choice: 'fp16'"),
        (["--preset", "huge"], "invalid choice: 'huge'"),
        (["--corpus", ""], "argument --corpus: the path is empty; give one, or leave the option out"),
        (["--model", "bert"], "invalid choice: 'bert'"),
        (["--ep", "2"], "unrecognized arguments: --ep 2"),
        (["--metrics", "/nowhere/m.jsonl"], "--metrics /nowhere/m.jsonl: cannot be written; give a file in a folder"),
    ],
)
def test_refusal_names_the_flag_and_the_value(arguments: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        parse(*arguments, world_size=4)


def test_metrics_file_with_content_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.touch()
    parse("--metrics", str(path))
    path.write_text("{}\n")
    with pytest.raises(UsageError, match="never overwritten; give a new name"):
        parse("--metrics", str(path))


def test_metrics_of_a_resumed_run_may_have_content_but_not_be_unwritable(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("{}\n")
    resumed = ["--checkpoint", str(tmp_path), "--resume", "--metrics"]
    parse(*resumed, str(path))
    with pytest.raises(UsageError, match=f"--metrics {tmp_path}: cannot be written"):
        parse(*resumed, str(tmp_path))


def test_scalars_need_their_package_and_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_scalars(None)
    monkeypatch.setattr(outputs, "find_spec", lambda _: object())
    prepare_scalars(tmp_path / "new" / "scalars")
    assert (tmp_path / "new" / "scalars").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"no folder that can be written to \(File exists\); give another one"):
        prepare_scalars(tmp_path / "file")
    monkeypatch.setattr(outputs, "find_spec", lambda _: None)
    with pytest.raises(UsageError, match="run pip install tensorboard, or leave --tensorboard out"):
        prepare_scalars(tmp_path)


def test_placement_comes_from_the_variables_of_torchrun() -> None:
    environment = {"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}
    assert read_placement(environment) == Placement(
        rank=5, local_rank=1, world_size=8, local_world_size=4, launched=True
    )
    assert read_placement({}) == Placement(rank=0, world_size=1, launched=False)


def test_commands_in_the_readme_are_accepted() -> None:
    commands = re.findall(r"^\$ (.*-m reference_trainer.*)$", README.read_text(), flags=re.MULTILINE)
    assert commands
    for command in commands:
        words = shlex.split(command)
        num_ranks = int(words[words.index("--nproc-per-node") + 1]) if "--nproc-per-node" in words else 1
        arguments = words[words.index("reference_trainer") + 1 :]
        if "--help" not in arguments:
            parse(*arguments, world_size=num_ranks)


def test_learning_rate_grows_with_the_global_batch_unless_given() -> None:
    # The preset has 3e-3 for 24 sequences.
    assert parse("--preset", "tiny", "--batch-size", "48").learning_rate == pytest.approx(6e-3)
    assert parse("--preset", "tiny", "--batch-size", "48", "--learning-rate", "1e-3").learning_rate == 1e-3


def test_ranks_share_a_device_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from reference_trainer.parallelism.devices import choose_device

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setenv("NCCL_HOSTID", "to be put back")
    monkeypatch.delenv("NCCL_HOSTID")
    placement = Placement(rank=3, local_rank=3, world_size=4, local_world_size=4, launched=True)
    arguments = ("--preset", "gpu")
    with pytest.raises(UsageError, match=r"there are 1 for 4 rank.s. here; start fewer ranks, give --share-devices"):
        choose_device(parse_options(arguments, placement), placement)
    assert "NCCL_HOSTID" not in os.environ
    shared = parse_options((*arguments, "--share-devices"), placement)
    assert choose_device(shared, placement) == torch.device("cuda", 0)
    assert os.environ["NCCL_HOSTID"] == "rank-3"  # NCCL refuses two ranks of one host on one device
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(UsageError, match="no CUDA device to share"):
        choose_device(shared, placement)
