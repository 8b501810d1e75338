"""Feed damaged logs to their reader: `python -m tests.diagnosis.fuzz_logs [COUNT] [SEED]`; a traceback is a fault."""

import random
import sys
import tempfile
import time
from pathlib import Path

from tests.diagnosis.test_logs_reading import PIECES, check


def damaged(chance: random.Random, pieces: list[bytes]) -> bytes:
    """Return some sentences in any order: cut, repeated, spliced into each other, with bytes changed."""
    parts = []
    for _ in range(chance.randrange(1, 8)):
        piece = bytearray(chance.choice(pieces))
        for _ in range(chance.randrange(4)):
            at = chance.randrange(len(piece) + 1)
            change = chance.randrange(5)
            if change == 0:
                del piece[at : at + chance.randrange(1, 40)]
            elif change == 1:
                piece[at:at] = chance.choice(pieces)[: chance.randrange(200)]
            elif change == 2:
                piece[at : at + 1] = bytes([chance.randrange(256)])
            elif change == 3:
                piece[at:at] = str(chance.choice([0, -1, 2**31, 2**63, 10**19, chance.randrange(10)])).encode()
            else:
                piece[at:at] = chance.choice(
                    [b"\n", b"\r", b"\0", b"[rank1]: ", b"1: ", b"(W pid=1, ip=a) ", b"\x1b[0m"]
                )
        parts.append(bytes(piece))
    return b"\n".join(parts)


def main() -> None:
    """Check that many inputs."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    chance = random.Random(seed)
    pieces = [piece.encode("utf-8", "replace") for piece in PIECES]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "fuzzed.log"
        for _ in range(count):
            path.write_bytes(damaged(chance, pieces))
            check(path)
    print(f"{count} inputs, seed {seed}, {time.monotonic() - begun:.0f} s: no fault")


if __name__ == "__main__":
    main()
