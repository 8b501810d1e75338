"""Compare tracebacks of functions with those of functions that stand in for them: prints "alike", or where they differ.

Runs under every Python that dtprof supports, without torch.
"""

import contextlib
import difflib
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Any

from dtprof import fence


def itself(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def replaced(function: Callable[..., Any]) -> Callable[..., Any]:
    def stand_in(*args: Any) -> Any:
        try:
            return function(*args)
        except BaseException as error:
            fence.hide_frame(error)
            raise

    return stand_in


def tracebacks(wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> list[str]:
    of_c = wrap(int)

    @wrap
    def fails() -> None:
        raise ValueError("fails")

    @wrap
    def goes_on() -> None:
        try:
            fails()
        except ValueError as error:
            raise KeyError("goes on") from error

    @wrap
    def twice() -> None:
        goes_on()

    def yields() -> Iterator[int]:
        yield 0
        of_c("a")

    def in_a_generator() -> None:
        for _ in yields():
            pass

    def while_another_is_handled() -> None:
        try:
            int("b")
        except ValueError:
            with contextlib.suppress(ValueError):
                fails()
            raise

    texts = []
    for case in (lambda: of_c("a"), fails, goes_on, twice, in_a_generator, while_another_is_handled):
        try:
            case()
        except (ValueError, KeyError):
            texts.append(traceback.format_exc())
        assert sys.exc_info() == (None, None, None)
    return "".join(texts).splitlines()


def main() -> None:
    bare, covered = tracebacks(itself), tracebacks(replaced)
    print("alike" if covered == bare else "\n".join(difflib.ndiff(bare, covered)))


main()
