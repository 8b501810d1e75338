"""The number of ranks of a job, from the declarations of its ranks.

One rule for records, live views, logs and dumps alike, and for what they say together. A declaration is

- of records and live views, the header of a rank, once it has joined a group or knows the size from its launcher;
- of a log, each line that states the size;
- of merged sources, the size of each. Flight Recorder dumps declare none: their groups name the ranks.

The rule:

- Only ranks of one attempt count, as a rule the newest: an elastic restart may change the size.
- Sizes of 0 (not known yet) and above MAX_WORLD_SIZE (a damaged header) do not count.
- Of the others, the most common one: one damaged header in 1,000 neither adds ranks that never were nor hides any.
  Where several are as common, the largest: a rank that has not joined yet declares itself alone.
- At least one more than the highest rank that left a record: that rank exists.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dtprof.records.rank_processes import newest_header

MAX_WORLD_SIZE = 1 << 20


def resolve_world_size(declared: Iterable[int], ranks: Iterable[int] = ()) -> int:
    """Return the number of ranks of the job; 0 where nothing is known of it.

    Parameters:
        declared: world size by rank, of one attempt.
        ranks: that left a record.
    """
    plausible = Counter(size for size in declared if 0 < size <= MAX_WORLD_SIZE)
    most_common = max(plausible.items(), key=lambda item: (item[1], item[0]), default=(0, 0))[0]
    return max(most_common, max(ranks, default=-1) + 1)


def newest_attempt(folders: Mapping[int, Sequence[tuple[int, Path]]]) -> int:
    """Return the newest attempt of any rank; `folders` is `Run.folders`: attempts by rank, ascending."""
    return max((attempts[-1][0] for attempts in folders.values()), default=0)


def newest_ranks(folders: Mapping[int, Sequence[tuple[int, Path]]]) -> list[int]:
    """Return the ranks of the newest attempt, ascending."""
    newest = newest_attempt(folders)
    return sorted(rank for rank, attempts in folders.items() if attempts[-1][0] == newest)


def read_world_size(folders: Mapping[int, Sequence[tuple[int, Path]]]) -> int:
    """Read the world size of the newest attempt from the headers alone; 0 where no header can be read."""
    headers = {rank: newest_header(folders[rank][-1][1]) for rank in newest_ranks(folders)}
    declared = {rank: header["world_size"] for rank, header in headers.items() if header is not None}
    return resolve_world_size(declared.values(), declared)
