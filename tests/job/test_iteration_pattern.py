"""What a rank did at a place in its earlier rounds, against what it does there now."""

from dataclasses import replace

import pytest

from dtprof.job.groups import GroupId
from dtprof.job.issued_operations import Operation
from dtprof.job.iteration_pattern import (
    find_departures,
    find_repetition,
    is_short_in_step,
    iterations_by_round,
    keeps_pattern,
    newest_departure,
    usual_operation,
)
from dtprof.records.sites import Site

WORLD = GroupId.of("0", (0, 1))


def rounds(text: str) -> list[Operation]:
    """Return a collective for each letter, the letters standing for operations."""
    return [
        Operation(group=WORLD, op=letter, seq=at, p2p=False, done=True, issued_ns=at, observed=True)
        for at, letter in enumerate(text)
    ]


@pytest.mark.parametrize(
    ("program", "usual"),
    [
        ("abcabcab" + "c", None),  # as in each round
        ("abcabcab" + "d", "c"),  # something new where c always came
        ("abcabcab" + "a", "c"),  # the next round, without c
        ("ab" + "c", None),  # the first round: nothing is usual
        ("abcabdab" + "c", None),  # c and d came there in turn
        ("xabcyabdxab" + "e", "c"),  # what preceded operations of the round before tell the rounds apart
    ],
)
def test_an_operation_is_unusual_where_another_always_followed_the_same_operations(
    program: str, usual: str | None
) -> None:
    operations = rounds(program)
    found = usual_operation(operations, operations[-1])
    assert (found.op if found is not None else None) == usual


@pytest.mark.parametrize(
    ("program", "departures"),
    [
        ("abcabcabcabc", []),
        ("abcababcabc", [(5, "c")]),  # one round without c
        ("ababzababzababz", []),  # each round ends its inner loop so
        ("ababzababzabzababz", [(12, "a")]),  # one turn of the inner loop left out
    ],
)
def test_what_a_rank_goes_on_with_in_each_round_is_no_departure(
    program: str, departures: list[tuple[int, str]]
) -> None:
    assert [(at, usual.op) for at, usual in find_departures(rounds(program))] == departures


def test_the_first_round_of_several_calls_in_a_row_is_no_departure_of_the_later_ones() -> None:
    label = rounds("b")[0].label
    assert newest_departure(rounds("aaabbbb" * 4 + "a"), label) is None
    assert newest_departure(rounds("aaabbbb" * 3 + "aaaba"), label) == 25


@pytest.mark.parametrize(
    ("program", "keeps"),
    [
        ("abcabcab" + "c", True),
        ("abcabcab" + "d", False),
        ("ab" + "c", None),
        ("abcabdab" + "c", None),  # c and d came there in turn
    ],
)
def test_whether_a_rank_keeps_its_pattern_is_not_known_where_it_has_none(program: str, keeps: bool | None) -> None:
    assert keeps_pattern(rounds(program), len(program) - 1) is keeps


def stepping(*steps: str) -> list[Operation]:
    """Return a collective for each letter, a text for each step."""
    return [
        Operation(group=WORLD, op=letter, seq=0, p2p=False, done=True, issued_ns=0, observed=True, step=step)
        for step, text in enumerate(steps)
        for letter in text
    ]


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (("abc", "abc", "abb"), ("b", "c", 1)),
        (("abc", "abc", "abbc"), ("b", "c", 1)),  # and went on
        (("abc", "abc", "abab"), ("a", "c", 2)),
        (("abc", "abc", "ab", "b"), None),  # a step later: what is between was left out
        (("abcabcabb",), None),  # without steps nothing tells
        (("aab", "aab", "aaa"), None),  # a loop that took one more turn
        (("abc", "abbc", "abb"), None),  # as in the round before
        (("abc", "abc", "abd"), None),  # not made before in this step
    ],
)
def test_calls_made_again_in_a_step_are_a_repetition_where_earlier_rounds_went_on(
    steps: tuple[str, ...], found: tuple[str, str, int] | None
) -> None:
    again = find_repetition(stepping(*steps))
    assert (again and (again.first.op, again.usual.op, again.count)) == found


def test_sizes_tell_which_of_several_calls_of_a_line_is_made_again() -> None:
    operations = [
        replace(operation, op=operation.op.lower(), numel=ord(operation.op), step=step)
        for step, part in enumerate(("bBa", "bBa", "bBa", "bBbB"))
        for operation in rounds(part)
    ]
    again = find_repetition(operations)
    assert again is not None
    assert (again.first.op, again.usual.op, again.count) == ("b", "a", 2)


@pytest.mark.parametrize(
    ("steps", "is_short"),
    [
        (("aab", "aab", "ab", "c"), True),
        (("aab", "aab", "aab", "c"), False),
        (("aab", "ab", "ab", "c"), False),  # it is not always made as often
        (("aab", "ab", "c"), False),  # one step is no pattern
        (("aab", "aab", "a"), False),  # the step has not ended
    ],
)
def test_a_step_in_which_a_call_is_made_less_often_than_in_each_before_is_short(
    steps: tuple[str, ...], is_short: bool
) -> None:
    operations = stepping(*steps)
    last = next(o for o in reversed(operations) if o.op == "a")
    assert is_short_in_step(operations, last) is is_short


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        (("ab", "ab", "aA"), True),  # `A` is at the line of `a`, by a caller that is new
        (("ab", "aAb", "aA"), False),  # as in the round before
        (("ab", "ab", "cA"), False),  # nothing at that line came before in the step
    ],
)
def test_a_call_by_a_new_caller_at_a_line_of_the_step_is_made_again(steps: tuple[str, ...], found: bool) -> None:
    again = find_repetition(
        [
            replace(operation, op=operation.op.lower(), site=at_line(operation.op))
            for operation in stepping("ab", "ab", *steps)
        ]
    )
    assert (again is not None) == found
    assert again is None or again.first.site.callers == at_line("A").callers  # type: ignore[union-attr]


def at_line(letter: str) -> Site:
    caller = Site(file="train.py", line=ord(letter), function="main")
    return Site(file="train.py", line=ord(letter.lower()), function="average", callers=(caller,))


def test_callers_tell_collectives_apart_and_no_messages() -> None:
    collective = replace(rounds("a")[0], site=at_line("a"))
    other = replace(collective, site=at_line("A"))
    assert (collective.label == other.label, collective.place == other.place) == (False, True)
    assert replace(collective, p2p=True).label == replace(other, p2p=True).label


@pytest.mark.parametrize(
    ("program", "turns"),
    [("aaab" * 2 + "aab", [3, 3, 2]), ("aaabb" * 2 + "aa", [3, 3, 2]), ("baab", [2]), ("bb", []), ("xaxab", [2])],
)
def test_turns_of_a_loop_are_counted_between_calls_of_what_follows_it(program: str, turns: list[int]) -> None:
    (a, b), operations = rounds("ab"), rounds(program)
    assert iterations_by_round(operations, a, b) == turns
