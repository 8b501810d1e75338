"""Kinds of the paths given to `dtprof diagnose`, by their content: runs, Flight Recorder dumps, plain logs."""

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from dtprof.diagnosis.sources.logs.log_files import files_of, looks_like_a_log
from dtprof.errors import NotARunError
from dtprof.formatting import plural
from dtprof.records import paths, remote
from dtprof.records.manifest import is_run, read_manifest
from dtprof.records.run_files import Place, is_written_by_dtprof

HEAD_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class DiagnosisInputs:
    """Paths by kind."""

    runs: tuple[Path, ...]
    dumps: tuple[Path, ...]
    logs: tuple[Path, ...]
    problems: tuple[str, ...]


def sort_inputs(given: Iterable[Path]) -> DiagnosisInputs:
    """Classify every path; files of directories that are no runs are classified one by one.

    Raises:
        MissingDependencyError: a package that a URL needs is not installed.
        NotARunError: a path does not exist or cannot be read, or none is anything that can be diagnosed.
    """
    runs: list[Path] = []
    dumps: list[Path] = []
    logs: list[Path] = []
    problems: list[str] = []
    for given_path in dict.fromkeys(given):
        path = remote.fetch(given_path)
        _refuse_part_of_a_run(path)
        if path.is_dir():
            _refuse_imported_dumps(path)
            files, inner = ([], []) if is_run(path) else _files_beside_runs(path)
            if inner and not files:
                raise NotARunError(
                    f"{path} holds {plural(len(inner), 'run')} and is none; expected one run: "
                    f"dtprof diagnose {shlex.quote(str(inner[-1]))}"
                )
            problems += [f"{run} is a run and was not read: give it by its name, too" for run in inner]
            if not files:
                runs.append(given_path)  # its reader says what is wrong with an empty directory
        elif path.exists():
            files = [path]
        else:
            raise NotARunError(f"{path} does not exist. Expected a run directory, Flight Recorder dumps or job logs.")
        for file in files:
            if _is_dump(file):
                dumps.append(file)
            elif looks_like_a_log(file):
                logs.append(file)
            else:
                problems.append(f"{file} is neither a Flight Recorder dump nor text, and was not read")
    if not (runs or dumps or logs):
        raise NotARunError(f"{problems[0]}. Expected a run directory, Flight Recorder dumps or job logs.")
    return DiagnosisInputs(runs=tuple(runs), dumps=tuple(dumps), logs=tuple(logs), problems=tuple(problems[:5]))


def _files_beside_runs(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the files below a folder apart from those of runs, and these runs."""
    files = list(files_of([folder]))
    inner = sorted({file.parent for file in files if file.name == paths.MANIFEST and is_run(file.parent)})
    return [file for file in files if not set(inner).intersection(file.parents)], inner


def _refuse_part_of_a_run(path: Path) -> None:
    """Refuse a file or folder that dtprof keeps in a run: read alone, it would be taken for a log.

    Raises:
        NotARunError: it is one.
    """
    whole = path.absolute()
    for run in list(whole.parents)[:2]:
        first = whole.relative_to(run).parts[0]
        is_of_node = paths.is_node_folder(first) and (run / first).is_dir()
        is_part = is_of_node or paths.parse_rank_folder(first) or is_written_by_dtprof(Place.RUN, first)
        if is_part and is_run(run):
            raise NotARunError(
                f"{path} is a part of the run {run}; expected the whole: dtprof diagnose {shlex.quote(str(run))}"
            )


def _refuse_imported_dumps(path: Path) -> None:
    """Refuse a run made of Flight Recorder dumps: it holds the input of a summary, not the state of the job.

    Raises:
        NotARunError: it is one.
    """
    manifest = read_manifest(path)
    if manifest.imported == "Flight Recorder":
        files = manifest.imported_files
        given = " ".join(files[:2]) + (" ..." if len(files) > 2 else "")
        raise NotARunError(
            f"{path} was imported from Flight Recorder dumps and does not hold how the job stood; expected the dumps "
            f"themselves: dtprof diagnose {given or 'DUMP...'}"
        )


def _is_dump(file: Path) -> bool:
    from dtprof.diagnosis.sources.flight_recorder.dump_reader import looks_like_dump

    try:
        with file.open("rb") as opened:
            head = opened.read(64)
            return looks_like_dump(head if head[:1] == b"\x80" else head + opened.read(HEAD_BYTES))
    except OSError as error:
        raise NotARunError(f"{file} cannot be read: {error.strerror}. Give a file that you may read.") from None
