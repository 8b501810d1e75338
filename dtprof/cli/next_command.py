"""The command to run next, printed after the results."""

import shlex
import sys
from pathlib import Path


def say_next(*words: str | Path) -> None:
    """Print the next command on stderr, below the results."""
    from dtprof.records import remote

    sys.stdout.flush()
    shown = [remote.named(word) if isinstance(word, Path) else word for word in words]
    print(f"next: {shlex.join(['dtprof', *shown])}", file=sys.stderr)
