"""Options in the command line of a launcher."""

import re
from collections.abc import Sequence


def find_option(command: Sequence[str], pattern: re.Pattern[str]) -> str | None:
    """Return the value of the first word that the pattern matches, whose second group is a value after `=`."""
    for position, word in enumerate(command):
        match = pattern.fullmatch(word)
        if match is not None:
            return match[2] if match[2] is not None else next(iter(command[position + 1 : position + 2]), None)
    return None
