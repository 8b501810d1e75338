"""The dumps of a job: which file is of which rank."""

import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dtprof.diagnosis.sources.flight_recorder.dump_reader import read_dump
from dtprof.diagnosis.sources.flight_recorder.dump_tables import NO_LABEL, ArgumentTable, CollectiveArguments, Dump
from dtprof.errors import NotADumpError
from dtprof.job.parallel_reading import read_files


def read_dumps(paths: Sequence[Path], labels: ArgumentTable) -> tuple[list[Dump], list[str], list[int]]:
    """Read dumps, one for each rank; return them, the read errors, and the ranks of those files.

    Raises:
        NotADumpError: none can be read, or two are of one rank.
    """
    found: dict[int, Dump] = {}
    problems: list[str] = []
    unreadable: list[int] = []
    for path, (dump, arguments) in zip(paths, read_files(_read, paths), strict=True):
        if isinstance(dump, str):
            if len(paths) == 1:
                raise NotADumpError(dump)
            problems.append(dump)
            unreadable += [named] if (named := _rank_in_name(path)) is not None else []
            continue
        rank = _rank(path, dump)
        if rank in found:
            raise NotADumpError(
                f"{path} and {found[rank].path} are both of rank {rank}; expected one dump of each rank. "
                "Give those of one job and one attempt, with the rank at the end of the name."
            )
        numbers = [labels.number(a.op, a.numel_in, a.numel_out, a.dtype, a.site) for a in arguments]
        found[rank] = replace(_renumbered(dump, numbers), rank=rank)
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


def _read(path: Path) -> tuple[Dump | str, list[CollectiveArguments]]:
    """Read a file, or say why it cannot be read; the labels have numbers of their own."""
    labels = ArgumentTable()
    try:
        return read_dump(path, labels), list(labels)
    except NotADumpError as error:
        return str(error), []


def _renumbered(dump: Dump, numbers: list[int]) -> Dump:
    if numbers == [*range(len(numbers))]:  # as a rule ranks come to the same lines in the same order
        return dump
    number = [*numbers, NO_LABEL].__getitem__  # NO_LABEL is the last index, too
    return replace(dump, rows=replace(dump.rows, labels=array("i", map(number, dump.rows.labels))))
