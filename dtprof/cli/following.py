"""The command that follows another, said after its results."""

import shlex
import sys
from pathlib import Path


def say_next(*words: str | Path) -> None:
    """Print the next command on stderr, below the results."""
    sys.stdout.flush()
    print(f"next: {shlex.join(['dtprof', *map(str, words)])}", file=sys.stderr)
