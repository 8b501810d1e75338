"""The names of phases that a program gives."""

from typing import Any, cast

from dtprof.capture.user_marks import LONGEST_NAME, MOST_NAMES, OTHERS, UserMarks
from dtprof.records import events


class Heard:
    """Takes the place of spans, and of steps."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def begin(self, phase: str) -> int:
        """Note the name."""
        self.names.append(phase)
        return len(self.names)


def names_of(*given: str) -> list[str]:
    heard = Heard()
    marks = UserMarks(cast("Any", heard), cast("Any", heard))
    for name in given:
        marks.begin_phase(name)
    return heard.names


def test_names_are_distinguished_from_those_of_dtprof() -> None:
    assert names_of("thinking", "checkpoint") == ["phase:thinking", events.CHECKPOINT]


def test_a_name_that_is_no_valid_text_can_be_written_down() -> None:
    (name,) = names_of("read \udcff")
    assert name == "phase:read \\udcff"
    assert name.encode("utf-8")


def test_names_that_are_too_long_are_cut_and_too_many_share_one() -> None:
    assert names_of("x" * 1_000) == ["phase:" + "x" * LONGEST_NAME]
    names = names_of(*map(str, range(MOST_NAMES + 2)))
    assert names[MOST_NAMES - 1 :] == [f"phase:{MOST_NAMES - 1}", f"phase:{OTHERS}", f"phase:{OTHERS}"]
