"""The transcripts: which commands run on which stored inputs, and where what they must print is kept."""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.golden.commands import HERE, STORED, transcript, unpack

EXPECTED = HERE / "expected"
RUNS = (
    "ddp",
    "slow",
    "fsdp",
    "pipeline-tensor",
    "python-hook",
    "single",
    "two-hosts",
    "profiler-window",
    "archived",
    "restarted",
    "hung",
    "skipped",
    "crashed",
    "killed",
    "cut-short",
    "imported-kineto",
    "imported-flight-recorder",
    "nccl-ddp",
)
"""Stored runs, `runs/NAME.tar.xz` each; tests/golden/README.md says how each was recorded."""
LIMITS = (
    "--max-step-ms 300 --max-exposed 20% --max-wait 5% --max-bubble 25% --max-peak-memory 440MiB "
    "--min-tokens-per-s 9000 --min-samples-per-s 50 --no-risk"
)
REPORTED = ("ddp", "pipeline-tensor", "hung")
COMPARED = (("ddp", "slow"), ("ddp", "fsdp"), ("ddp", "two-hosts"), ("python-hook", "imported-kineto"))
EXPORTS = (
    ("pipeline-tensor", "csv", ""),
    ("pipeline-tensor", "chrome", ".json.gz"),
    ("pipeline-tensor", "prometheus", ".txt"),
    ("two-hosts", "chrome", ".json.gz"),
    ("two-hosts", "perfetto", ".pftrace"),
    ("hung", "chrome", ".json.gz"),
    ("hung", "csv", ""),
    ("single", "kineto", ""),
    ("imported-kineto", "prometheus", ".txt"),
)
"""Run, format and ending of the name of an export."""


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """Command lines, the archives that hold what they read, and where what they must print is kept."""

    name: str
    archives: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The file of what must be printed."""
        return EXPECTED / self.name

    def expected(self) -> str:
        """Return what must be printed; nothing where that is not known yet."""
        return self.path.read_text(encoding="utf-8") if self.path.exists() else ""

    def run(self, folder: Path) -> str:
        """Run the command lines in a folder of unpacked inputs and return what they print."""
        for archive in self.archives:
            unpack(archive, folder)
        return transcript(folder, self.lines)


def _declare() -> Iterator[Transcript]:
    for run in RUNS:
        for command in ("summary", "diagnose"):
            yield _of_run(f"{run}/{command}.txt", f"dtprof {command} {run}")
            yield _of_run(f"{run}/{command}-json.txt", f"dtprof {command} {run} --json")
        if run != "archived":  # the longest: two commands are enough
            yield _of_run(f"{run}/check.txt", f"dtprof check {run} {LIMITS}", f"dtprof check {run} {LIMITS} --json")
            yield _of_run(f"{run}/top.txt", f"dtprof top {run} --once")
    yield _of_run("ddp/summary-markdown.txt", "dtprof summary ddp --markdown")
    yield _of_run("hung/stacks.txt", "dtprof stacks hung --kept", "dtprof stacks hung --kept --json")
    yield _of_run("profiler-window/trace.txt", "dtprof trace profiler-window")
    yield _of_run("profiler-window/trace-json.txt", "dtprof trace profiler-window --json")
    allowed = "dtprof check slow --max-slowdown-against ddp --max-slowdown"
    yield _of("slow/check-against-ddp.txt", ("ddp", "slow"), f"{allowed} 5%", f"{allowed} 200%")
    for a, b in COMPARED:
        yield _of(f"{a}/compare-{b}.txt", (a, b), f"dtprof compare {a} {b}")
        yield _of(f"{a}/compare-{b}-json.txt", (a, b), f"dtprof compare {a} {b} --json")
    for run, kind, ending in EXPORTS:
        output = f"exported-{run}-{kind}{ending}"
        yield _of_run(
            f"{run}/export-{kind}.txt", f"dtprof export {run} --format {kind} -o {output} --force", f"show {output}"
        )
    for run in REPORTED:
        page = f"page-of-{run}.html"
        yield _of_run(f"{run}/report.txt", f"dtprof report {run} -o {page} --force", f"show {page}")
    page = "page-of-ddp-and-slow.html"
    yield _of(
        "ddp/report-against-slow.txt",
        ("ddp", "slow"),
        f"dtprof report ddp --against slow --dashboard comparison -o {page} --force",
        f"show {page}",
    )
    yield from _of_several_nodes()
    yield from _of_imports()
    for archive in ("runs/faults", "runs/nccl-faults", "files/dumps", "files/logs"):
        yield from _of_many(archive)


def _of(name: str, runs: tuple[str, ...], *lines: str) -> Transcript:
    return Transcript(name=name, archives=tuple(f"runs/{run}" for run in runs), lines=lines)


def _of_run(name: str, *lines: str) -> Transcript:
    return _of(name, (name.partition("/")[0],), *lines)


def _of_several_nodes() -> Iterator[Transcript]:
    """Declare what is read of a job whose two launchers have written a run each."""
    nodes = "nodes/node-a nodes/node-b"
    yield _of_run("nodes/diagnose.txt", f"dtprof diagnose {nodes}", f"dtprof diagnose {nodes} --json")
    yield _of_run("nodes/summary.txt", "dtprof summary nodes/node-a", "dtprof summary nodes/node-a --json")
    yield _of_run("nodes/gather.txt", f"dtprof gather {nodes} -o gathered --force", "dtprof summary gathered --json")


def _of_imports() -> Iterator[Transcript]:
    """Declare what is made of traces of other tools."""
    traces = {
        "kineto": ("runs/profiler-window", "profiler-window/rank-00000.0 profiler-window/rank-00001.0"),
        "flight-recorder": ("files/traces", "traces/flight-recorder"),
        "horovod": ("files/traces", "traces/horovod"),
        "xla": ("files/traces", "traces/xla"),
        "straggler-analysis": ("files/traces", "traces/straggler-analysis"),
    }
    for name, (archive, paths) in traces.items():
        yield Transcript(
            name=f"imports/{name}.txt",
            archives=(archive,),
            lines=(f"dtprof import {paths} -o of-{name} --force", f"dtprof summary of-{name} --json"),
        )


def _of_many(archive: str) -> Iterator[Transcript]:
    """Declare the verdicts on each folder of an archive, in text and JSON."""
    for name in _folders_in(archive):
        family = archive.partition("/")[2]
        path = f"{family}/{name}"
        yield Transcript(
            name=f"{family}/{name}.txt",
            archives=(archive,),
            lines=(f"dtprof diagnose {path}", f"dtprof diagnose {path} --json"),
        )


@cache
def _folders_in(archive: str) -> list[str]:
    with tarfile.open(STORED / f"{archive}.tar.xz") as tar:
        return sorted({parts[1] for member in tar.getmembers() if len(parts := Path(member.name).parts) > 1})


TRANSCRIPTS = tuple(_declare())
