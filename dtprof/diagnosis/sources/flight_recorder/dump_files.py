"""The dumps of a job: which file is of which rank, and many files read on all cores."""

import multiprocessing
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from dtprof.diagnosis.sources.flight_recorder.dump_reader import read_dump
from dtprof.diagnosis.sources.flight_recorder.dump_tables import NO_LABEL, ArgumentTable, CollectiveArguments, Dump
from dtprof.errors import NotADumpError

MANY_BYTES = 16 << 20
"""Size of all files above which reading them in several processes is worth starting these."""
FILES_AT_ONCE = 8
MAX_PROCESSES = 8


def read_dumps(paths: Sequence[Path], labels: ArgumentTable) -> tuple[list[Dump], list[str], list[int]]:
    """Read dumps, one for each rank; return them, the read errors, and the ranks of those files.

    Raises:
        NotADumpError: none can be read, or two are of one rank.
    """
    found: dict[int, Dump] = {}
    problems: list[str] = []
    unreadable: list[int] = []
    for path, dump in _read_all(paths, labels):
        if isinstance(dump, NotADumpError):
            if len(paths) == 1:
                raise dump
            problems.append(str(dump))
            unreadable += [named] if (named := _rank_in_name(path)) is not None else []
            continue
        rank = _rank(path, dump)
        if rank in found:
            raise NotADumpError(
                f"{path} and {found[rank].path} are both of rank {rank}; expected one dump of each rank. "
                "Give those of one job and one attempt, with the rank at the end of the name."
            )
        found[rank] = replace(dump, rank=rank)
    if not found:
        raise NotADumpError(f"none of {len(paths)} files is a dump that can be read. {problems[0]}")
    return [found[rank] for rank in sorted(found)], problems, unreadable


def _rank_in_name(path: Path) -> int | None:
    match = re.search(r"(\d{1,7})(\.[A-Za-z]\w*)*$", path.name)
    return int(match[1]) if match else None


def _rank(path: Path, dump: Dump) -> int:
    """Return the rank: the number that ends the file name, unless the groups, each with this rank, say otherwise."""
    named = _rank_in_name(path)
    sets = [set(group.ranks) for group in dump.groups.values() if group.ranks]
    possible = set.intersection(*sets) if sets else set()
    if named is not None and (not possible or named in possible):
        return named
    if len(possible) == 1:
        return possible.pop()
    listed = ", ".join(map(str, sorted(possible)[:8])) or "none that its groups tell"
    raise NotADumpError(
        f"{path} does not name its rank: its name ends in {named if named is not None else 'no number'}, "
        f"possible are {listed}. Name the file as torch does, with the rank at the end."
    )


def _read_all(paths: Sequence[Path], labels: ArgumentTable) -> Iterator[tuple[Path, Dump | NotADumpError]]:
    processes = min(MAX_PROCESSES, len(os.sched_getaffinity(0)), len(paths))
    if processes < 2 or "fork" not in multiprocessing.get_all_start_methods() or _size(paths) < MANY_BYTES:
        yield from ((path, _read(path, labels)) for path in paths)
        return
    parts = [paths[i : i + FILES_AT_ONCE] for i in range(0, len(paths), FILES_AT_ONCE)]
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for part, (dumps, theirs) in zip(parts, pool.imap(_read_part, parts), strict=True):
            numbers = [
                labels.number(entry.op, entry.numel_in, entry.numel_out, entry.dtype, entry.site) for entry in theirs
            ]
            for path, dump in zip(part, dumps, strict=True):
                yield path, _renumbered(dump, numbers) if isinstance(dump, Dump) else NotADumpError(dump)


def _size(paths: Sequence[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.exists())


def _read(path: Path, labels: ArgumentTable) -> Dump | NotADumpError:
    try:
        return read_dump(path, labels)
    except NotADumpError as error:
        return error


def _read_part(paths: Sequence[Path]) -> tuple[list[Dump | str], list[CollectiveArguments]]:
    """Read files in a process of their own, whose labels have numbers of their own."""
    labels = ArgumentTable()
    found = [_read(path, labels) for path in paths]
    return [dump if isinstance(dump, Dump) else str(dump) for dump in found], list(labels)


def _renumbered(dump: Dump, numbers: list[int]) -> Dump:
    if numbers == [*range(len(numbers))]:  # as a rule ranks come to the same lines in the same order
        return dump
    number = [*numbers, NO_LABEL].__getitem__  # NO_LABEL is the last index, too
    return replace(dump, rows=replace(dump.rows, labels=array("i", map(number, dump.rows.labels))))
