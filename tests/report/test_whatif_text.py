"""The text of a prediction."""

import pytest

from dtprof.analysis.whatif.prediction import Prediction, Scenario
from dtprof.analysis.whatif.slowdowns import Slowdowns
from dtprof.report.text.whatif_text import whatif_text


def text_of(share: float, *, slowest: tuple[int, ...] = (3,)) -> str:
    """Return the text of a run that takes 120 ms a step where 100 ms are ideal."""
    slowdowns = Slowdowns(
        replayed_ns=120e6,
        ideal_ns=100e6,
        by_operation={},
        by_rank={3: 1.15},
        by_stage={},
        m_w=share,
        m_s=None,
        slowest_ranks=slowest,
    )
    return whatif_text(Prediction(run="run", replay_error=0.0, slowdowns=slowdowns))


@pytest.mark.parametrize(
    ("share", "said"),
    [(0.6, "60 % of the slowdown goes if rank 3 is ideal"), (1.05, "all of the slowdown goes if rank 3 is ideal")],
)
def test_the_slowest_ranks_are_named_with_the_slowdown_that_goes_with_them(share: float, said: str) -> None:
    assert said in text_of(share)


def test_many_slowest_ranks_are_counted() -> None:
    assert "60 % of the slowdown goes if the 9 slowest ranks are ideal" in text_of(0.6, slowest=tuple(range(9)))


def test_nothing_is_said_of_ranks_with_which_no_slowdown_goes() -> None:
    """With one of two ranks ideal a noisy replay may take longer: -0.66 of the slowdown is no share of it."""
    assert "of the slowdown" not in text_of(-0.66)


def test_the_interval_of_a_change_that_lengthens_steps_has_the_sign_of_its_words() -> None:
    """A gain of -20 % between -30 and -10 %: steps are longer by 10 to 30 %."""
    assert any("20.0 % longer (10.0 % to 30.0 %)" in line for line in table_of(-0.2))
    assert any("20.0 % shorter (10.0 % to 30.0 %)" in line for line in table_of(0.2))


def table_of(*gains: float) -> list[str]:
    scenarios = tuple(
        Scenario(fix=(f"rank={rank}",), step_ns=100e6, gain=gain, interval=(gain - 0.1, gain + 0.1), assumes="")
        for rank, gain in enumerate(gains)
    )
    return whatif_text(Prediction(run="run", replay_error=0.0, scenarios=scenarios)).splitlines()


def test_changes_that_gain_nothing_are_counted_and_a_negative_zero_is_none() -> None:
    lines = table_of(0.2, -0.0004, 0.0001)
    assert [line.split()[0] for line in lines if line.startswith("rank=")] == ["rank=0"]
    assert "2 more, of 0.0 %: --json" in lines
    (only,) = [line for line in table_of(-0.0004) if line.startswith("rank=0")]
    assert " 0.0 % " in only
    assert "-0.0" not in only
