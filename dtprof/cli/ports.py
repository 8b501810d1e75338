"""Values of port options."""

from dtprof.errors import UsageError

MAX_PORT = 65_535


def parse_port(text: str, *, option: str, example: int, least: int = 0) -> int:
    """Return the port that an option names; 0 is any free one.

    Raises:
        UsageError: it is none.
    """
    if not (text.isascii() and text.isdigit() and least <= int(text) <= MAX_PORT):
        raise UsageError(
            f"{option} is {text!r}; expected a port from {least} to {MAX_PORT}, for example "
            f"{option.split()[0]} {example}"
        )
    return int(text)
