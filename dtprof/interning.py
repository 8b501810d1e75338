"""Interning: values that recur, by number in the order of their first appearance."""

from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

Value = TypeVar("Value", bound=Hashable)


class Interned(Generic[Value]):
    """Values by number, numbers by value."""

    def __init__(self, values: Iterable[Value] = ()) -> None:
        """Start with some values, numbered from 0."""
        self.values: list[Value] = []
        self._numbers: dict[Value, int] = {}
        for value in values:
            self.number(value)

    def number(self, value: Value) -> int:
        """Return the number of a value, the next one where it is new."""
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number

    def __contains__(self, value: object) -> bool:
        return value in self._numbers

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Value]:
        return iter(self.values)

    def __getitem__(self, number: int) -> Value:
        return self.values[number]
