"""What the programs of single calls share: a section of measured calls, and small tensors."""

import torch

SIZE = 2


class Section:
    """Calls that are listed together."""

    def __init__(self, oracle, rank, title):
        self._oracle = oracle
        self._title = title
        self.rank = rank
        self.other = 1 - rank

    def call(self, name, function, refused=None, tensors=1):
        """Measure one call; the arguments are those of Oracle.measure."""
        self._oracle.measure(self._title, name, function, refused, tensors)

    def both(self, name, function, refused=None):
        """Measure a call that waits, and the same one that returns a handle."""

        def asynchronous():
            work = function(True)
            if work is not None:
                work.wait()

        self.call(f"{name} sync", lambda: function(False), refused)
        self.call(f"{name} async", asynchronous, refused)

    def pair(self, name, first, second):
        """Measure what rank 0 does together with what rank 1 does."""
        self.call(name, first if self.rank == 0 else second)


def ones(n=4, **options):
    return torch.ones(n, **options)


def leaf(n=4):
    return torch.ones(n, requires_grad=True)


def parts(n=4):
    return [ones(n) for _ in range(SIZE)]
