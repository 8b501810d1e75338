import json
from pathlib import Path

import pytest

from reference_trainer.checkpoint_folder import CheckpointFolder, Origin, refuse_folder
from reference_trainer.errors import UsageError
from reference_trainer.options import Options, parse_options
from reference_trainer.placement import Placement
from tests.reference_trainer.test_trainer_batches import TOKENS, build_tokens


def build_options(folder: Path, *arguments: str, attempt: int = 0) -> Options:
    sizes = ["--batch-size", "2", "--sequence-length", "9", "--checkpoint", str(folder)]
    return parse_options([*sizes, *arguments], Placement(attempt=attempt))


def publish(folder: CheckpointFolder, step: int, origin: Origin) -> None:
    folder.name_unfinished(step).mkdir()
    folder.publish(step, origin=origin, position={"num_samples": 2 * step})


@pytest.fixture
def origin(tmp_path: Path) -> Origin:
    return Origin.of(build_options(tmp_path), TOKENS)


def test_latest_points_to_the_last_and_as_many_stay_as_asked_for(tmp_path: Path, origin: Origin) -> None:
    folder = CheckpointFolder(tmp_path / "new", num_kept=2)
    assert folder.find_latest() is None
    folder.clear_unfinished()
    for step in (8, 9, 10, 11):
        publish(folder, step, origin)
        saved = folder.find_latest()
        assert saved is not None
        assert (saved.step, saved.position) == (step, {"num_samples": 2 * step})
    # By number, not by name: step-9 would come behind step-10.
    assert sorted(path.name for path in folder.path.iterdir()) == ["latest", "step-10", "step-11"]


def test_what_was_being_written_at_a_kill_is_never_taken_for_a_checkpoint(tmp_path: Path, origin: Origin) -> None:
    folder = CheckpointFolder(tmp_path, num_kept=2)
    publish(folder, 2, origin)
    (folder.name_unfinished(4)).mkdir()
    (folder.name_unfinished(4) / "half").touch()
    (tmp_path / "step-6").mkdir()  # killed between the name and the pointer
    saved = folder.find_latest()
    assert saved is not None
    assert saved.step == 2
    folder.clear_unfinished()
    publish(folder, 6, origin)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latest", "step-2", "step-6"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "bart"), r"step-2 is of another run: its model is gpt, not bart; give --model gpt, or another"),
        (("--preset", "small"), r"its shape is num_layers 4, dim 128.*, not num_layers 6, dim 256.*give the --preset"),
        (("--vocabulary-size", "300"), r"its shape is vocabulary_size 256, not vocabulary_size 300"),
        (("--precision", "fp64"), r"its precision is fp32, not fp64; give --precision fp32"),
        (("--seed", "3"), r"its seed is 0, not 3; give --seed 0"),
        (("--sequence-length", "8"), r"its sequence length is 9, not 8; give --sequence-length 9"),
    ],
)
def test_checkpoint_of_another_model_is_refused(
    tmp_path: Path, origin: Origin, arguments: tuple[str, ...], message: str
) -> None:
    publish(CheckpointFolder(tmp_path, num_kept=2), 2, origin)
    refuse_folder(build_options(tmp_path, "--resume"), TOKENS)
    with pytest.raises(UsageError, match=message):
        refuse_folder(build_options(tmp_path, "--resume", "--tokenizer", "bytes", *arguments), TOKENS)


def test_another_text_is_refused(tmp_path: Path, origin: Origin) -> None:
    publish(CheckpointFolder(tmp_path, num_kept=2), 2, origin)
    with pytest.raises(UsageError, match=r"its num tokens is 1000, not 500; give the --corpus .* of 1,000 tokens"):
        refuse_folder(build_options(tmp_path, "--resume"), build_tokens(500))


def test_checkpoints_are_never_overwritten_unless_a_run_goes_on(tmp_path: Path, origin: Origin) -> None:
    refuse_folder(build_options(tmp_path), TOKENS)
    publish(CheckpointFolder(tmp_path, num_kept=2), 2, origin)
    with pytest.raises(UsageError, match="never overwritten; give --resume"):
        refuse_folder(build_options(tmp_path), TOKENS)
    refuse_folder(build_options(tmp_path, attempt=1), TOKENS)


@pytest.mark.parametrize("content", [None, "{", json.dumps({"format": 9}), "[]"])
def test_checkpoint_that_cannot_be_read_is_refused(tmp_path: Path, origin: Origin, content: str | None) -> None:
    publish(CheckpointFolder(tmp_path, num_kept=2), 2, origin)
    facts = tmp_path / "step-2" / "trainer.json"
    facts.unlink() if content is None else facts.write_text(content)
    with pytest.raises(UsageError, match="step-2, which latest names, cannot be read"):
        refuse_folder(build_options(tmp_path, "--resume"), TOKENS)


@pytest.mark.parametrize("resume", [(), ("--resume",)])
def test_folder_that_cannot_be_made_is_refused(tmp_path: Path, resume: tuple[str, ...]) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UsageError, match=f"--checkpoint {path}: no folder that can be written to"):
            refuse_folder(build_options(path, *resume), TOKENS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--keep", "2"), "--keep needs a folder; give --checkpoint DIR too"),
        (("--resume",), "--resume needs a folder"),
        (("--checkpoint", "x", "--checkpoint-every", "0"), "--checkpoint-every is 0"),
        (("--checkpoint", "x", "--local-sgd", "2"), "--checkpoint with --local-sgd 2: .*leave one of the two out"),
    ],
)
def test_impossible_options_are_refused(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        parse_options(arguments, Placement())
