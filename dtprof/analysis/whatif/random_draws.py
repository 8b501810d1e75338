"""Random draws of replay and of intervals, the same in every process.

numpy.random is left alone: it takes 20 ms to import, as much as advice takes to be computed from a small run.
"""

import math
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class RandomDraws:
    """Draws whole numbers, the same ones for a seed."""

    def __init__(self, seed: int) -> None:
        """Begin with a seed."""
        self._random = random.Random(seed)

    def draw(self, shape: Sequence[int], *, below: int = 1 << 32) -> npt.NDArray[np.int64]:
        """Return numbers from 0 on and below a bound of at most 2^32, each as likely to some 2^-32 of the bound."""
        words = np.frombuffer(self._random.randbytes(4 * math.prod(shape)), "<u4").reshape(shape)
        return (words.astype(np.uint64) * np.uint64(below) >> np.uint64(32)).astype(np.int64)
