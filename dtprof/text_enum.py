"""Enumerations whose members are texts."""

import enum


class TextEnum(str, enum.Enum):
    """As enum.StrEnum, which Python 3.10 lacks: a member is printed as its text."""

    def __str__(self) -> str:
        """Return the text."""
        return str(self.value)
