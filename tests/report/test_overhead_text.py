"""The result of `dtprof overhead` in words: a difference only where the pairs show one."""

from dtprof.analysis.comparison.overhead_pairs import OverheadResult, Trial, compare
from dtprof.analysis.results import Overhead
from dtprof.report.documents.overhead_json import overhead_json
from dtprof.report.text.overhead_text import overhead_text

MS = 1_000_000
WHERE = {"machine": "2 cores, Python 3.11.7", "load_before": 0.5}
OWN = Overhead(capture_ns_per_event=900, capture_ns_total=1, share_of_step=0.0004)


def trial(step_ms: float, blocked_ms: float = 2.0) -> Trial:
    return Trial(
        wall_ns=round(step_ms * 100 * MS),
        startup_ns=3000 * MS,
        rank_startup_ns=2000 * MS,
        step_ns=step_ms * MS,
        blocked_ns=blocked_ms * MS,
        end_ns=50 * MS,
        num_steps=100,
        num_ranks=4,
    )


def result(recorded: list[float], control: list[float] | None = None) -> OverheadResult:
    bare = [trial(10.0)] * 6
    return compare(bare, [trial(value) for value in recorded], [trial(v) for v in control or [9.9, 10.1] * 3])


def text(of: OverheadResult, own: Overhead | None = OWN) -> str:
    said = overhead_text(of, own=own, command=["torchrun", "train.py"], where=WHERE)
    assert max(map(len, said.splitlines())) <= 80
    return " ".join(said.split())


def test_noise_is_called_noise() -> None:
    said = text(result([9.9, 10.1, 10.0, 10.2, 9.95, 10.0]))
    assert "step no difference beyond the noise: between -1.0 % and +2.0 %, 97 % confidence" in said
    assert "no change beyond the noise when recorded" in said
    assert "recording itself counted 0.04 % of a step" in said


def test_cost_is_reported_with_its_interval() -> None:
    said = text(result([10.4, 10.5, 10.6, 10.5, 10.4, 10.6]))
    assert "step 5.0 % longer when recorded (+4.0 % to +6.0 %, 97 % confidence): 500 us" in said


def test_machine_on_which_bare_runs_differ_too_is_said_to_be_unfit() -> None:
    said = text(result([10.5] * 6, control=[10.3] * 6))
    assert "but bare runs differ from bare runs here, too: measure more pairs on a quieter machine" in said


def test_runs_that_recorded_nothing_are_no_proof_of_low_cost() -> None:
    assert "own count none: the recorded runs hold no rank, so recording was not measured" in text(
        result([10.0] * 6), None
    )


def test_json_says_the_same() -> None:
    document = overhead_json(result([10.5] * 6), own=OWN, command=["torchrun", "train.py"], where=WHERE)
    times = document["times"]
    assert isinstance(times, dict)
    assert times["step"]["ratio"] == {"median": 1.05, "low": 1.05, "high": 1.05, "confidence": 0.9688}
    assert times["step"]["difference_ns"]["median"] == 500_000
    assert (times["step"]["differs"], times["startup"]["differs"]) == (True, False)
    assert document["overlap"] is not None
    bare = compare([Trial(wall_ns=1)] * 2, [Trial(wall_ns=1)] * 2, [Trial(wall_ns=1)] * 2)
    document = overhead_json(bare, own=None, command=["x"], where=WHERE)
    assert document["times"] == {"step": None, "rank_startup": None, "startup": None, "end": None} | {
        "wall": document["times"]["wall"]  # type: ignore[index]
    }
    assert (document["overlap"], document["own_count"]) == (None, None)
