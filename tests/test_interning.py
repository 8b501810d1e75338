"""Interning."""

from dtprof.interning import Interned


def test_values_are_numbered_in_the_order_of_their_first_appearance() -> None:
    names: Interned[str] = Interned(["other"])
    assert [names.number(name) for name in ("b", "a", "b", "other")] == [1, 2, 1, 0]
    assert (list(names), len(names), names[2], "a" in names, "c" in names) == (["other", "b", "a"], 3, "a", True, False)
