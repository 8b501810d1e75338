import json
from collections.abc import Callable
from pathlib import Path

import pytest

from reference_trainer.options import parse_options
from reference_trainer.placement import Placement
from reference_trainer.progress import Journal, open_metrics


def tick(*times_s: float) -> Callable[[], float]:
    return iter(times_s).__next__


def write_journal(path: Path, *, rank: int) -> None:
    """Journal two steps of 8 tokens, which end 2 s and 6 s after the start."""
    arguments = ["--steps", "2", "--batch-size", "2", "--sequence-length", "4", "--metrics", str(path)]
    options = parse_options(arguments, Placement())
    with Journal(options, rank=rank, clock=tick(10, 12, 16)) as journal:
        journal.record_step(1, loss=5.0, lr=0.1, grad_norm=1.0)
        journal.record_step(2, loss=4.0, lr=0.2, grad_norm=2.0)
        journal.summarise()


def test_rank_zero_writes_one_line_a_step(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write_journal(path, rank=0)
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first == {"step": 1, "loss": 5.0, "tokens_per_s": 4.0, "lr": 0.1, "grad_norm": 1.0}
    assert second["tokens_per_s"] == 2.0


def test_progress_goes_to_stderr_and_the_result_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_journal(tmp_path / "m.jsonl", rank=0)
    output = capsys.readouterr()
    # 16 tokens in 6 s
    assert output.out == "trained 2 steps in 6.0 s: loss 5.000 -> 4.000, 3 tokens/s\n"
    assert [line.split()[:4] for line in output.err.splitlines()] == [
        ["step", "1/2", "loss", "5.000"],
        ["step", "2/2", "loss", "4.000"],
    ]


def test_other_ranks_write_and_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_journal(tmp_path / "m.jsonl", rank=1)
    assert capsys.readouterr() == ("", "")
    assert not (tmp_path / "m.jsonl").exists()


def test_resumed_run_keeps_the_lines_up_to_its_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"st')
    open_metrics(path, num_done=2).close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_evaluation_is_a_line_of_its_own_and_takes_no_time_from_a_step(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    options = parse_options(
        ["--steps", "2", "--batch-size", "2", "--sequence-length", "4", "--metrics", str(path)], Placement()
    )
    with Journal(options, rank=0, clock=tick(0, 2, 100, 102)) as journal:
        journal.record_step(1, loss=5.0, lr=0.1, grad_norm=1.0)
        journal.record_evaluation(1, loss=4.5)
        journal.record_step(2, loss=4.0, lr=0.1, grad_norm=1.0)
    first, held_out, second = (json.loads(line) for line in path.read_text().splitlines())
    assert held_out == {"step": 1, "evaluation_loss": 4.5}
    assert first["tokens_per_s"] == second["tokens_per_s"] == 4.0


def test_a_terminal_shows_one_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    options = parse_options(["--steps", "4"], Placement())
    with Journal(options, rank=0, clock=tick(0, 1, 2)) as journal:
        journal.record_step(1, loss=5.0, lr=0.1, grad_norm=1.0)
        journal.record_step(2, loss=4.0, lr=0.1, grad_norm=1.0)
    bars = capsys.readouterr().err.split("\r\033[K")
    assert [bar.split(" loss")[0] for bar in bars[1:]] == [f"[{'#' * 6}{'.' * 18}] 1/4", f"[{'#' * 12}{'.' * 12}] 2/4"]


def test_scalars_are_written_for_tensorboard(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = parse_options(["--steps", "2", "--tensorboard", str(tmp_path / "tb")], Placement())
    with Journal(options, rank=0, clock=tick(0, 1, 2)) as journal:
        journal.record_step(1, loss=5.0, lr=0.1, grad_norm=1.0)
        journal.record_step(2, loss=4.0, lr=0.1, grad_norm=1.0)
    read = accumulator.EventAccumulator(str(tmp_path / "tb"))
    read.Reload()
    assert [(scalar.step, scalar.value) for scalar in read.Scalars("loss")] == [(1, 5.0), (2, 4.0)]
    assert set(read.Tags()["scalars"]) == {"loss", "tokens_per_s", "lr", "grad_norm"}
