"""Merge the folders that the launchers of one job have written on their hosts into one run.

The manifest is that of the run with rank 0; the other launchers appear as if they had joined that run.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dtprof.errors import OutputError, UsageError
from dtprof.formatting import plural
from dtprof.job.world_size import resolve_world_size
from dtprof.launch import run_directory
from dtprof.launch.run_joining import OF_RENDEZVOUS
from dtprof.records import paths, writer
from dtprof.records.file_copies import link_or_copy
from dtprof.records.manifest import read_document
from dtprof.records.rank_processes import newest_header

if TYPE_CHECKING:
    from dtprof.records.reader import Run

OF_THE_NODE = re.compile(
    r"--?(node[-_]rank|machine[-_]rank|local[-_]addr|master[-_]addr|rdzv[-_]endpoint|rdzv[-_]conf|nproc[-_]per[-_]node)"
)
"""Options that may differ from node to node of one job."""
SLACK_NS = 600_000_000_000
"""Largest plausible difference of hosts' clocks: runs further apart were not recorded at the same time."""
OF_A_LAUNCHER = (
    *("command", "boot_id", "started_realtime_ns", "ended_realtime_ns", "exit_status", "stopped_on_hang"),
    *("hang_detected_ns", "oom_kills", "host_oom_kills", "oom_victims", "truncated", "notes"),
)


@dataclass(frozen=True, kw_only=True)
class NodeRun:
    """The run of one launcher."""

    given: str  # the path that the user gave
    path: Path
    document: Mapping[str, Any]  # run.json
    folders: Mapping[tuple[int, int], Path]  # of each rank and attempt
    headers: Mapping[tuple[int, int], Mapping[str, Any]]  # newest of each that can be read

    @property
    def world_sizes(self) -> set[int]:
        """The world sizes that its ranks recorded, one as a rule."""
        return {header["world_size"] for header in self.headers.values() if header["world_size"] > 0}


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """The result of merging runs."""

    ranks: tuple[int, ...]
    missing: tuple[int, ...]
    remarks: tuple[str, ...]  # a sentence each


def read_node_run(run: "Run") -> NodeRun:
    """Read the header of every rank in the run of one launcher."""
    folders = {(rank, number): folder for rank, attempts in run.folders.items() for number, folder in attempts}
    headers = {key: header for key, folder in folders.items() if (header := newest_header(folder)) is not None}
    return NodeRun(
        given=run.name,
        path=run.path,
        document=read_document(run.path / paths.MANIFEST),
        folders=folders,
        headers=headers,
    )


def gather(runs: Sequence[NodeRun], output: Path, *, force: bool) -> Gathered:
    """Merge several runs into a new one.

    Raises:
        UsageError: they are not of one job, or hold the same rank twice.
        OutputError: the directory is taken or cannot be written to.
    """
    _check_places([run.path for run in runs], output)
    _check_job(runs, any_command=force)
    chosen, remarks = _choose_folders(runs)
    runs = sorted(runs, key=lambda run: (min(run.folders, default=(1 << 62, 0)), run.given))
    run_directory.create(output, force=force)
    try:
        for node in output.iterdir():
            node.rmdir()  # of this host, which had no launcher
        for (rank, number), folder in chosen.items():
            _copy_folder(folder, output / paths.rank_folder_name(rank, number))
        for run in runs:
            remarks += _copy_nodes(run, output, is_first=run is runs[0])
        documents = [(_host(run), run.document) for run in runs if run.document]
        writer.write_json(output / paths.MANIFEST, merge_manifests(documents, "gathered from the folders of"))
    except OSError as error:
        raise run_directory.output_error(output, error) from error
    ranks = tuple(sorted({rank for rank, _ in chosen}))
    attempt = max((number for _, number in chosen), default=0)
    headers = (item for run in runs for item in run.headers.items())
    declared = [header["world_size"] for (_, number), header in headers if number == attempt]
    world_size = resolve_world_size(declared, (rank for rank, number in chosen if number == attempt))
    newest = {number for run in runs if run.folders for number in [max(number for _, number in run.folders)]}
    if len(newest) > 1:
        remarks.append(f"the folders end with different attempts ({_listed(newest)}): only the newest is analysed")
    remarks += [f"{run.given} holds no rank" for run in runs if not run.folders]
    remarks += [f"{run.given} has no {paths.MANIFEST}" for run in runs if not run.document]
    missing = tuple(sorted(set(range(world_size)) - set(ranks)))
    return Gathered(ranks=ranks, missing=missing, remarks=tuple(remarks))


def _check_places(sources: Sequence[Path], output: Path) -> None:
    real = [source.resolve() for source in sources]
    for i, source in enumerate(real):
        if source in real[:i]:
            raise UsageError(f"{sources[i]} was given twice; expected the folder of each node once")
        target = output.resolve()
        if target == source or target in source.parents or source in target.parents:
            raise OutputError(f"{output} and {sources[i]} lie in each other; give a directory of its own with -o")


def _check_job(runs: Sequence[NodeRun], *, any_command: bool) -> None:
    """Refuse runs of different jobs, and runs with different commands unless `any_command`."""
    jobs = {run.path: str(run.document.get("job") or "") for run in runs}
    of_known_job = [run for run in runs if jobs[run.path] and not jobs[run.path].startswith(OF_RENDEZVOUS)]
    _refuse_where_they_differ([(run, jobs[run.path]) for run in of_known_job], "are of different jobs")
    if len(of_known_job) < len(runs) and not any_command:
        commands = [(run, _command(run.document.get("command"))) for run in runs if run.document.get("command")]
        _refuse_where_they_differ(commands, "ran different commands", "; --force joins them all the same")
    _refuse_where_they_differ(
        [(run, _listed(run.world_sizes)) for run in runs if run.world_sizes], "differ in world size"
    )
    spans = [
        (run, started, run.document.get("ended_realtime_ns") or 1 << 63)
        for run in runs
        if isinstance(started := run.document.get("started_realtime_ns"), int) and started
    ]
    for run, started, _ in spans:
        for other, _, ended in spans:
            if started > ended + SLACK_NS:
                late_s = (started - ended) / 1e9
                raise UsageError(
                    f"{run.given} began {late_s:,.0f} s after {other.given} had ended: these are two runs; expected "
                    "what the launchers of one job have written"
                )


def _refuse_where_they_differ(values: Sequence[tuple[NodeRun, str]], what: str, way_out: str = "") -> None:
    for run, value in values[1:]:
        first, expected = values[0]
        if value != expected:
            raise UsageError(
                f"{first.given} and {run.given} {what} ({expected}; {value}); expected what the launchers of one job "
                f"have written{way_out}"
            )


def _command(words: object) -> str:
    """Return a command without the options that differ between nodes."""
    common: list[str] = []
    skip = False
    for word in map(str, words) if isinstance(words, list) else ():
        option = OF_THE_NODE.match(word)
        if not skip and option is None:
            common.append(word if common else Path(word).name)
        skip = option is not None and "=" not in word
    return " ".join(common)


def _choose_folders(runs: Sequence[NodeRun]) -> tuple[dict[tuple[int, int], Path], list[str]]:
    """Return the folder of each rank and attempt; of two copies the longer."""
    chosen: dict[tuple[int, int], Path] = {}
    owners: dict[tuple[int, int], NodeRun] = {}
    doubled: list[int] = []
    for run in runs:
        for key, folder in sorted(run.folders.items()):
            owner = owners.setdefault(key, run)
            if owner is run:
                chosen[key] = folder
                continue
            first, second = (_process(holder.headers.get(key)) for holder in (owner, run))
            if first != second:
                raise UsageError(
                    f"rank {key[0]} is in {owner.given} ({first}) and in {run.given} ({second}): two processes were "
                    "this rank; expected what the launchers of one job have written, each rank once"
                )
            doubled.append(key[0])
            if _size(folder) > _size(chosen[key]):
                chosen[key] = folder
    remarks = [f"ranks {_listed(doubled)} were there twice, as copies; the longer one is taken"] if doubled else []
    return chosen, remarks


def _process(header: Mapping[str, Any] | None) -> str:
    return f"pid {header['pid']} on {header['host']}" if header is not None else "unreadable"


def _size(folder: Path) -> int:
    return sum(512 * file.stat().st_blocks for file in folder.iterdir())


def _copy_folder(source: Path, target: Path) -> None:
    target.mkdir()
    for file in sorted(source.iterdir()):
        if file.is_file():
            link_or_copy(file, target / file.name)


def _copy_nodes(run: NodeRun, output: Path, *, is_first: bool) -> list[str]:
    """Copy the folders of nodes; a launcher that is not the first becomes one that joined."""
    remarks = []
    named = ""
    for source in paths.node_folders(run.path):
        # Two launchers on one host, or hosts of one name, have folders of one name.
        target = next(free for name in paths.numbered(source.name) if not (free := output / name).exists())
        named = named or target.name
        _copy_folder(source, target)
        if not is_first and (target / paths.CLOCK).exists() and _forget_offsets(target / paths.CLOCK):
            remarks.append(
                f"the clock of {source.name} was not measured against that of the launcher of the first ranks: "
                "the records alone align it"
            )
    if not is_first and run.document:
        place = output / (named or paths.node_folder_name(_host(run)))
        place.mkdir(exist_ok=True)
        write_launcher(launcher_file(place, run.document), _host(run), run.document)
    return remarks


def launcher_file(node_folder: Path, manifest: Mapping[str, Any]) -> Path:
    """Return where the document of a launcher lies, by its manifest."""
    pid = manifest.get("launcher_pid")
    return node_folder / f"launcher-{pid if isinstance(pid, int) else 0}.json"


def write_launcher(file: Path, host: str, manifest: Mapping[str, Any]) -> None:
    """Write the document of a launcher that joined a run, from the manifest that it wrote on its own host."""
    writer.write_json(file, {"host": host} | {name: manifest[name] for name in OF_A_LAUNCHER if name in manifest})


def _forget_offsets(file: Path) -> bool:
    """Reduce a clock file to that of a host without measurements; say whether it held any."""
    owner, was_measured = None, False
    for line in file.read_bytes().splitlines():
        try:
            row = json.loads(line)
            if "boot_id" in row:
                owner = owner or row | {"is_reference": False}
            else:
                was_measured = True
        except (ValueError, TypeError):
            continue
    file.unlink()  # it may be a hard link to the original
    if owner is not None:
        writer.append_line(file, owner)
    return was_measured


def _host(run: NodeRun) -> str:
    hosts = run.document.get("hosts")
    return str(hosts[0]) if isinstance(hosts, list) and hosts else run.path.name


def merge_manifests(manifests: Sequence[tuple[str, Mapping[str, Any]]], how: str) -> dict[str, object]:
    """Return the manifest of a run of several launchers: that of the first, with the fields that depend on all.

    Parameters:
        manifests: the host and the manifest of each launcher.
        how: they came together, for the notes.
    """
    documents = [document for _, document in manifests]
    first = next(iter(documents), {})

    def numbers(name: str) -> list[Any]:
        return [value for document in documents if isinstance(value := document.get(name), int) and value]

    hosts = [
        str(host) for document in documents if isinstance(document.get("hosts"), list) for host in document["hosts"]
    ]
    notes = [f"{host}: {note}" for host, document in manifests for note in document.get("notes") or ()]
    statuses = numbers("exit_status")
    return {
        **first,
        "hosts": list(dict.fromkeys(hosts)),
        "started_realtime_ns": min(numbers("started_realtime_ns"), default=0),
        "ended_realtime_ns": max(numbers("ended_realtime_ns"), default=0),
        "exit_status": statuses[0] if statuses else first.get("exit_status"),
        "stopped_on_hang": any(numbers("stopped_on_hang")),
        "hang_detected_ns": next(iter(numbers("hang_detected_ns")), None),
        "oom_kills": sum(numbers("oom_kills")),
        "host_oom_kills": sum(numbers("host_oom_kills")),
        "oom_victims": [victim for document in documents for victim in document.get("oom_victims") or ()],
        "truncated": any(numbers("truncated")),
        "notes": [*notes, f"{how} {plural(len(manifests), 'launcher')}"],
    }


def _listed(numbers: Sequence[int] | set[int]) -> str:
    return ", ".join(map(str, sorted(set(numbers))))
