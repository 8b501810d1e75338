"""Run four troubled jobs under each tool, and write what each says into a page.

    python -m benchmarks.other_tools [TOOL ...] [--folder FOLDER] [--write PAGE]

Each tool is installed from PyPI into an environment of its own, beside the torch of this interpreter. The programs are
in `programs/`. What is printed is kept as it is, shortened where a line "[...]" says so.
"""

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
BEGIN, END = "<!-- what python -m benchmarks.other_tools wrote -->", "<!-- end of what it wrote -->"
ENDS_AFTER_S = 60.0
"""When a job that hangs is stopped, on a machine without other work."""
MOST_LINES, WIDTH = 32, 160
NOISE = re.compile(
    r"Parsed|Overall parsing|Rounding down|leaving parse|.*RuntimeWarning|  return \(shifted|Traceback|  File"
    r"|\[TraceML\]|\[rank\d\]|[EWI]\d{4}|WARNING:|tabulate is not| +\^+$| +[a-z_.]+ = |=+$|-+$"
)
"""Lines that say how a tool goes about it."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job with one thing wrong."""

    name: str
    ranks: int
    wrong: str
    hangs: bool = False

    @property
    def program(self) -> str:
        """The path of its program."""
        return str(PROGRAMS / f"{self.name}_job.py")


JOBS = (
    Job(name="slow_rank", ranks=3, wrong="samples take rank 1 40 ms longer a step"),
    Job(name="skipped_collective", ranks=3, wrong="rank 1 skips an all_reduce in step 12, and all hang", hangs=True),
    Job(name="uneven_pipeline", ranks=2, wrong="the second of two stages has three times the layers"),
    Job(name="growing_memory", ranks=2, wrong="rank 1 keeps the output of each step, 2 MiB more in each"),
)


@dataclass(frozen=True, kw_only=True)
class Said:
    """A command, and what it printed."""

    job: str
    command: str
    printed: str


@dataclass(frozen=True, kw_only=True)
class Tool:
    """A tool: what it is called, the packages to install, and how it is asked about one job."""

    title: str
    packages: tuple[str, ...]
    asks: Callable[[Job, Path, Path], list[Said]]


def python_of(place: Path, packages: tuple[str, ...]) -> Path:
    """Return the interpreter of an environment with these packages and the torch of this interpreter."""
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        (folder,) = place.glob("lib/python3*/site-packages")
        beside = place / "torch"
        beside.mkdir()
        known = Path(torch.__file__).parents[1]
        for path in known.iterdir():
            if re.match(
                r"(torch|functorch|torchgen|sympy|networkx|jinja2|filelock|fsspec|mpmath|markupsafe|typing_ext|numpy)",
                path.name,
                re.IGNORECASE,
            ):
                (beside / path.name).symlink_to(path)
        (folder / "torch_beside.pth").write_text(f"{beside}\n", encoding="utf-8")
    if packages:
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


def run(command: list[str], folder: Path, *, until_s: float = 600.0, **variables: str) -> str:
    """Run a command; return what it printed. One that takes longer is interrupted, then killed with all it started."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "120"} | variables
    output = folder / "printed.txt"
    with output.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(until_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return output.read_text(encoding="utf-8", errors="replace")


def torchrun(python: Path | str, job: Job) -> list[str]:
    """Return the command of a job."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(job.ranks), job.program]
    return [str(python), *launch]


def limit_s(job: Job) -> float:
    """Return when a job is stopped: one that hangs must have come to its hang, beside other work as well."""
    return ENDS_AFTER_S * max(1.0, os.getloadavg()[0]) if job.hangs else 600.0


def traces_of(job: Job, place: Path, python: Path) -> Path:
    """Record traces of a job with torch.profiler; return their folder."""
    traces = place / f"traces-{job.name}"
    if not list(traces.glob("*")):
        traces.mkdir(parents=True, exist_ok=True)
        run(torchrun(python, job), place, until_s=limit_s(job), TOOL="profiler", FOLDER=str(traces))
    return traces


def dtprof(job: Job, place: Path, _python: Path) -> list[Said]:
    """Record a job, and ask for the verdict; of the sound ones for the summary as well."""
    recorded = place / job.name
    options = ["--hang-after", "5", "--on-hang", "stop"] if job.hangs else []
    launch = [sys.executable, "-m", "dtprof", "run", "--force", "-o", str(recorded), *options, "--"]
    run([*launch, *torchrun(sys.executable, job)], place)
    shown = " ".join(["dtprof run", *options, "--", "torchrun ..."])
    said = []
    for asked in ("diagnose",) if job.hangs else ("diagnose", "summary"):
        printed = run([sys.executable, "-m", "dtprof", asked, str(recorded)], place)
        said.append(Said(job=job.name, command=f"{shown}; dtprof {asked} RUN", printed=printed))
    return said


def holistic_trace_analysis(job: Job, place: Path, python: Path) -> list[Said]:
    """Ask for each analysis that needs no further argument."""
    traces = traces_of(job, place, python)
    printed = run([str(python), str(HERE / "ask_hta.py"), str(traces)], place)
    return [Said(job=job.name, command="TraceAnalysis(trace_dir=TRACES)", printed=printed)]


def tensorboard_plugin(job: Job, place: Path, python: Path) -> list[Said]:
    """Ask for what the plugin's pages show."""
    traces = traces_of(job, place, python)
    printed = run([str(python), str(HERE / "ask_tb_profiler.py"), str(traces)], place)
    return [Said(job=job.name, command="tensorboard --logdir TRACES, its pages as text", printed=printed)]


def traceml(job: Job, place: Path, python: Path) -> list[Said]:
    """Run a job under TraceML; return the summary that it prints at the end."""
    command = [
        str(python.with_name("traceml")),
        "run",
        job.program,
        "--nproc-per-node",
        str(job.ranks),
        "--mode",
        "summary",
    ]
    printed = run(command, place, until_s=limit_s(job), TOOL="traceml")
    return [
        Said(
            job=job.name,
            command=f"traceml run {job.name}_job.py --nproc-per-node {job.ranks} --mode summary",
            printed=printed,
        )
    ]


def flight_recorder(job: Job, place: Path, _python: Path) -> list[Said]:
    """Dump what a hung job has recorded, and have it analysed; a job that ends has nothing to ask."""
    if not job.hangs:
        return []
    dumps = place / "dumps"
    dumps.mkdir(exist_ok=True)
    recording = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_FR_CPP_STACK": "0"}
    run(
        torchrun(sys.executable, job),
        place,
        until_s=limit_s(job),
        TOOL="flight-recorder",
        FOLDER=str(dumps),
        **recording,
    )
    command = [str(Path(sys.executable).with_name("torchfrtrace")), str(dumps), "--prefix", "dump_"]
    analysed = Said(job=job.name, command="torchfrtrace DUMPS --prefix dump_", printed=run(command, place))
    command = [sys.executable, "-m", "dtprof", "diagnose", *map(str, sorted(dumps.iterdir()))]
    return [analysed, Said(job=job.name, command="dtprof diagnose DUMPS/*", printed=run(command, place))]


TOOLS = {
    "dtprof": Tool(title="dtprof", packages=(), asks=dtprof),
    "hta": Tool(title="HolisticTraceAnalysis", packages=("HolisticTraceAnalysis",), asks=holistic_trace_analysis),
    "tb": Tool(
        title="torch-tb-profiler",
        packages=("torch-tb-profiler", "tensorboard", "setuptools<81"),
        asks=tensorboard_plugin,
    ),
    "traceml": Tool(title="TraceML", packages=("traceml-ai",), asks=traceml),
    "flight-recorder": Tool(title="Flight Recorder", packages=(), asks=flight_recorder),
}


def shortened(printed: str, place: Path) -> str:
    """Return the lines without colours, paths of this machine, and what is too much."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed).replace("\r", "")
    for path, shown in ((PROGRAMS, "jobs"), (place, "try"), (Path(sys.prefix), "venv"), (HERE, "ask")):
        wrapped = r"(?:\n +)?".join(map(re.escape, str(path)))  # where a line was full in the middle of it
        text = re.sub(wrapped, f"/home/user/train/{shown}", text)
    lines = [line.rstrip()[:WIDTH] for line in text.splitlines() if line.strip(" |") and not NOISE.match(line)]
    if len(lines) > MOST_LINES:
        lines = [*lines[:MOST_LINES], "[...]"]
    return "\n".join(lines)


def version_of(tool: Tool, python: Path) -> str:
    """Return the installed version of a tool."""
    package = tool.packages[0] if tool.packages else {"dtprof": "dtprof"}.get(tool.title, "torch")
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _name(text: str) -> str:
    # Not `choices`, against which argparse checks a default list as if it were one value.
    if text not in TOOLS:
        raise argparse.ArgumentTypeError(f"{text} is none of {', '.join(TOOLS)}")
    return text


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the tools to run, and where the answers go."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.other_tools", description=__doc__.splitlines()[0])
    parser.add_argument(
        "tools", nargs="*", default=list(TOOLS), type=_name, metavar="TOOL", help=f"default: {' '.join(TOOLS)}"
    )
    parser.add_argument("--folder", type=Path, default=Path(".make/other-tools"), help="for environments and results")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="put all results so far into this page")
    return parser.parse_args(words)


def main() -> int:
    """Ask each tool about each job, and write the answers."""
    given = arguments()
    folder = given.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    kept = folder / "said.json"
    said = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
    for name in given.tools:
        tool, place = TOOLS[name], folder / name
        place.mkdir(exist_ok=True)
        python = python_of(place / "environment", tool.packages) if tool.packages else Path(sys.executable)
        shown = []
        for answer in (answer for job in JOBS for answer in tool.asks(job, place, python)):
            shown.append(dataclasses.replace(answer, printed=shortened(answer.printed, place)))
            if not shown[-1].printed:  # TraceML gives up where its own server takes long to start
                raise SystemExit(f"{tool.title} said nothing of {answer.job}; {place / 'printed.txt'} has its log")
        said[name] = {"version": version_of(tool, python), "said": [dataclasses.asdict(one) for one in shown]}
        kept.write_text(json.dumps(said, indent=1), encoding="utf-8")
        print(f"{tool.title} {said[name]['version']}: {len(shown)} answers", flush=True)
    if given.write:
        text = given.write.read_text(encoding="utf-8")
        before, rest = text.split(BEGIN)
        given.write.write_text(f"{before}{BEGIN}\n\n{page(said)}\n\n{END}{rest.split(END)[1]}", encoding="utf-8")
    return 0


def page(said: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the answers, by job."""
    parts = []
    for job in JOBS:
        parts.append(f"### `{job.name}_job.py`: {job.wrong}")
        for name, tool in TOOLS.items():
            answers = [one for one in said.get(name, {}).get("said", []) if one["job"] == job.name]
            for answer in answers:
                parts.append(f"{tool.title} {said[name]['version']}, `{answer['command']}`:")
                parts.append(f"```text\n{answer['printed']}\n```")
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.exit(main())
