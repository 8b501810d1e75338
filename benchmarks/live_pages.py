"""How old the figures and the verdict of live pages are, and what watching costs, for 8 ranks.

A synthetic job is recorded ahead; its records appear when their time has come.

The server is asked once a second for the overview, as an open page asks. The age of a figure is the time since the step
that the page names had ended on all ranks: up to one step more than the time since it was drawn.
"""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks import history, pairs
from dtprof.records import paths, schema
from dtprof.records.rank_log.archive import RECORD_DTYPE
from tests.synthetic.job import Job, Truth
from tests.synthetic.writing import generate

SECONDS, SETTLING_S, ASK_EVERY_S = 75.0, 15.0, 1.04
JOB = Job(pp=4, dp=2, microbatches=16, layers=2, layer_ns=1_450_000, jitter=0.05, slow={3: 1.2})
"""About 100 events of each rank and 190 ms a step."""
FIGURES = re.compile(r"figures as of step ([\d,]+)")
VERDICT = re.compile(r"verdict as of step ([\d,]+)")


class Growth(threading.Thread):
    """Lets the records of a synthetic run appear when their time has come, on a thread."""

    def __init__(self, whole: Path, run: Path, truth: Truth) -> None:
        """Make a run whose ranks have recorded nothing yet."""
        super().__init__(daemon=True)
        self._stopping = threading.Event()
        self._ends_ns = truth.end.max(axis=1)
        self._begin_ns = int(truth.begin.min())
        self._segments = []
        for source in sorted(whole.rglob("*")):
            copy = run / source.relative_to(whole)
            if source.is_dir():
                copy.mkdir(parents=True, exist_ok=True)
            elif source.name == paths.MANIFEST:
                job = json.loads(source.read_text()) | {"ended_realtime_ns": None, "exit_status": None}
                copy.write_text(json.dumps(job))
            elif source.name == paths.STRINGS:
                lines = source.read_text().splitlines(keepends=True)
                copy.write_text("".join(line for line in lines if json.loads(line)["k"] != "exit"))
            elif source.name.startswith(paths.segment_name(0)[:-5]):
                assert source.name == paths.segment_name(0), "only one segment of a rank can grow: take fewer steps"
                header = bytearray(source.read_bytes()[: schema.HEADER_SIZE])
                head = schema.unpack_header(bytes(header))["head"]
                for field, num_bytes in (("head", 8), ("marks", 4)):
                    at = schema.HEADER_OFFSET[field]
                    header[at : at + num_bytes] = bytes(num_bytes)
                copy.write_bytes(header)
                os.truncate(copy, schema.SEGMENT_SIZE)
                self._segments.append((copy, np.fromfile(source, RECORD_DTYPE, count=head, offset=schema.HEADER_SIZE)))
            else:
                shutil.copy(source, copy)
        self._began = time.monotonic_ns()

    def age_s(self, step: int) -> float:
        """Return for how long a step has ended on all ranks; steps count from 1."""
        ended_ns = int(self._ends_ns[step - 1]) - self._begin_ns if step else 0
        return (time.monotonic_ns() - self._began - ended_ns) / 1e9

    def run(self) -> None:
        """Write the new records of each segment, then its head, 50 times a second."""
        files = [file.open("r+b", buffering=0) for file, _ in self._segments]
        heads = [0] * len(files)
        while not self._stopping.wait(0.02):
            now_ns = self._begin_ns + time.monotonic_ns() - self._began
            for i, (file, (_, rows)) in enumerate(zip(files, self._segments, strict=True)):
                head = int(np.searchsorted(rows["issued_ns"], now_ns))
                file.seek(schema.HEADER_SIZE + heads[i] * schema.RECORD_SIZE)
                file.write(rows[heads[i] : head].tobytes())
                file.seek(schema.HEADER_OFFSET["head"])
                file.write(head.to_bytes(8, "little"))
                heads[i] = head
        for file in files:
            file.close()

    def stop(self) -> None:
        """Let no more records appear."""
        self._stopping.set()
        self.join()


@contextmanager
def growing_run(folder: Path) -> Iterator[tuple[Path, Growth]]:
    """Give a run that grows until the block ends."""
    steps = int((SECONDS + 2 * SETTLING_S) * 1e9 / 180e6)
    truth = generate(folder / "whole", replace(JOB, steps=steps))
    growth = Growth(folder / "whole", folder / "job", truth)
    growth.start()
    try:
        yield folder / "job", growth
    finally:
        growth.stop()


def show_cpu(name: str, before: tuple[float, float], after: tuple[float, float], seconds: float) -> None:
    """Print the share of a core."""
    user, system = ((b - a) / seconds for a, b in zip(before, after, strict=True))
    history.keep(f"{name}: share of a core [%]", [100 * (user + system)])
    print(f"{name}: {100 * user:.2f} % of a core in user code, {100 * system:.2f} % in the system")


def show_ages(name: str, ages: list[float]) -> None:
    """Print how old something was at each answer."""
    history.keep(f"{name} [s]", ages)
    median, most, worst = np.percentile(ages, (50, 95, 100))
    print(f"{name}: {median:.1f} s median, {most:.1f} s 95th percentile, {worst:.1f} s worst; {len(ages)} answers")


def measure_pages(run: Path, growth: Growth) -> None:
    """Ask `dtprof dashboard` as an open page does."""
    command = [sys.executable, "-m", "dtprof", "dashboard", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            address = f"{server.stdout.readline().strip()}run/{urllib.parse.quote(run.name)}/"
            urllib.request.urlopen(address, timeout=60).read()
            figures: list[float] = []
            verdicts: list[float] = []
            version, began, counted, before = 0, time.monotonic(), None, (0.0, 0.0)
            while time.monotonic() - began < SECONDS:
                time.sleep(ASK_EVERY_S)
                url = f"{address}documents?page=overview&since={version}"
                with urllib.request.urlopen(url, timeout=60) as answer:
                    news = json.load(answer)
                version, text = news["version"], news["status"]["text"]
                if counted is None:
                    if time.monotonic() - began < SETTLING_S:
                        continue
                    counted, before = time.monotonic(), pairs.cpu_s(server.pid)
                drawn = FIGURES.search(text)
                judged = VERDICT.search(text) or drawn  # said once where both are of one step
                assert drawn is not None, text
                assert judged is not None, text
                figures.append(growth.age_s(int(drawn[1].replace(",", ""))))
                verdicts.append(growth.age_s(int(judged[1].replace(",", ""))))
            assert counted is not None
            show_ages("age of the figures", figures)
            show_ages("age of the verdict", verdicts)
            show_cpu("dtprof dashboard", before, pairs.cpu_s(server.pid), time.monotonic() - counted)
        finally:
            server.terminate()


def measure_terminal(run: Path) -> None:
    """Let `dtprof top` draw on a terminal."""
    own, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "100", "LINES": "40"}
    command = [sys.executable, "-m", "dtprof", "top", str(run)]
    with subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment) as top:
        reader = threading.Thread(target=_drain, args=(own,), daemon=True)
        reader.start()
        try:
            time.sleep(SETTLING_S)
            before = pairs.cpu_s(top.pid)
            time.sleep(SECONDS / 3)
            show_cpu("dtprof top", before, pairs.cpu_s(top.pid), SECONDS / 3)
        finally:
            top.terminate()
            top.wait()
            os.close(theirs)
    reader.join()
    os.close(own)


def _drain(terminal: int) -> None:
    try:
        while os.read(terminal, 1 << 16):
            pass
    except OSError:  # nothing holds the other end any more
        return


def main() -> None:
    """Measure both views, each over a job of its own."""
    with tempfile.TemporaryDirectory() as folder, growing_run(Path(folder)) as (run, growth):
        measure_pages(run, growth)
    with tempfile.TemporaryDirectory() as folder, growing_run(Path(folder)) as (run, _):
        measure_terminal(run)
    print(f"afterwards: {pairs.machine()}")


if __name__ == "__main__":
    pairs.run_alone(main, __doc__)
