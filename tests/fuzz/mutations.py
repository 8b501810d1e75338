"""Changes to inputs that keep more of their form than changed bytes do."""

import random
from collections.abc import Callable

from tests.interchange.damage import damaged

Mutate = Callable[[bytes, int], bytes]


def mutated(data: bytes, max_bytes: int, seed: int, by_bytes: Mutate) -> bytes:
    """Return an input with a value of its JSON replaced, lines moved about, or bytes changed by the fuzzer."""
    chance = random.Random(seed)
    kind = chance.randrange(4)
    if kind == 0 and data[:1] in (b"{", b"["):
        try:
            return damaged(data, chance)[:max_bytes]
        except (ValueError, RecursionError, IndexError):
            return by_bytes(data, max_bytes)
    if kind == 1 and data.count(b"\n") > 1:
        return _lines_moved(data, chance)[:max_bytes]
    return by_bytes(data, max_bytes)


def _lines_moved(data: bytes, chance: random.Random) -> bytes:
    lines = data.split(b"\n")
    for _ in range(chance.randrange(1, 4)):
        at, to = chance.randrange(len(lines)), chance.randrange(len(lines))
        if chance.randrange(2):
            lines.insert(to, lines[at])
        else:
            lines[at], lines[to] = lines[to], lines[at]
    return b"\n".join(lines)
