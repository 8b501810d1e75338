"""Show a run in TensorBoard: export it to a log directory, serve that, and add the steps that a running job ends."""

import importlib.util
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from dtprof.errors import MissingDependencyError, NotARunError, UsageError
from dtprof.session.engines import IN_THIS_PROCESS, Engine, at_hand, beside, executor_for, open_run
from dtprof.session.run_measurement import complete, summarise_fully

if TYPE_CHECKING:
    from dtprof.analysis.results import Summary
    from dtprof.interchange.exporters.tensorboard_logs import Account, ScalarLogs
    from dtprof.job.rank_executor import Executor
    from dtprof.records.reader import Run

Result = TypeVar("Result")

PICTURES = ("step_parts", "step_phases", "step_times", "timeline", "bubble_parts", "blame", "memory_categories")
"""Figures of the report that need no more than the summary."""
AGAIN_AFTER_S = 10.0
SHARE_OF_A_CORE = 0.1
"""Reading a long run again and again may not take more than this."""


def view_run(path: Path, engine: Engine, *, port: int, announce: Callable[[str, list[str]], None]) -> int:
    """Show a run in TensorBoard until that ends; return its exit status.

    Parameters:
        port: of this machine to serve it on.
        announce: called with the name of the run and remarks on what was omitted, once it is exported.

    Raises:
        MissingDependencyError: tensorboard is not installed.
        UsageError: the port is taken.
        NotARunError: the path holds no run that can be read.
    """
    from dtprof.session.executors import memory_pools

    require_tensorboard()
    refuse_taken_port(port)
    memory_pools.use_one_pool()
    opened = open_run(path, engine)
    with tempfile.TemporaryDirectory(prefix="dtprof-tensorboard-") as scratch:
        with executor_for(engine, opened) as executor:
            logs, remarks = write_logs(at_hand(opened, executor), Path(scratch), executor)
        announce(opened.name, remarks)
        with _following(path, logs, live=not opened.manifest.ended_realtime_ns):
            return _serve(scratch, port)


def write_logs(
    run: "Run", folder: Path, executor: "Executor", *, steps: tuple[int, int] | None = None
) -> "tuple[ScalarLogs, list[str]]":
    """Write the log directory of a run; return the logs, to which steps can be added, and remarks on omitted parts.

    While workers read and sum up the ranks, this process reads what the verdict needs of them.
    """
    from dtprof.analysis.timeline.operation_detail import RankDetail, read_to_sum, summarise_and_map
    from dtprof.interchange.exporters.tensorboard_logs import read_shown, read_shown_by_ranges, write_tensorboard

    summed_up: Future[Summary] = Future()

    def on_ranks(work: Callable[[RankDetail], Result]) -> list[Result]:
        summary, results = summarise_and_map(detail, work, executor)
        summed_up.set_result(complete(summary, run))
        return results

    with beside(executor, lambda: account_for(run, summed_up.result)) as account:
        try:
            detail = read_to_sum(run, executor)
            if detail.surveys.ranges is None:
                shown = read_shown(detail, steps=steps, on_ranks=on_ranks)
            else:
                summed_up.set_result(summarise_fully(run, executor, surveys=detail.surveys))
                shown = read_shown_by_ranges(detail, executor, steps=steps)
            return write_tensorboard(shown, folder, account=account)
        finally:
            summed_up.cancel()  # where that failed, else in vain


def require_tensorboard() -> None:
    """Say so where tensorboard is not installed, before anything is worked out for it.

    Raises:
        MissingDependencyError: it is not.
    """
    if importlib.util.find_spec("tensorboard") is None:
        raise MissingDependencyError(
            "tensorboard is not installed, and is needed for this; pip install 'dtprof[tensorboard]'"
        )


def account_for(run: "Run", summarise: "Callable[[], Summary]") -> "Account":
    """Return the summary and the verdict on a run as Markdown, and the figures of its report as pictures."""
    from dtprof.interchange.exporters.figure_pictures import draw_picture
    from dtprof.interchange.exporters.tensorboard_logs import Account
    from dtprof.report.figures.drawing import Drawing
    from dtprof.report.figures.figure_registry import FIGURES
    from dtprof.report.figures.figure_source import Source
    from dtprof.report.text.summary_text import summary_text
    from dtprof.report.text.verdict_text import verdict_text
    from dtprof.session.run_diagnosis import diagnose_opened, stragglers_of

    verdict = diagnose_opened(run, lambda: stragglers_of(summarise()))
    summary = summarise()
    texts = {"summary": summary_text(summary), "verdict": verdict_text(verdict)}
    source = Source(summary=summary)
    drawn = {name: FIGURES[name](source) for name in PICTURES}
    return Account(
        texts={tag: "    " + text.replace("\n", "\n    ") for tag, text in texts.items()},
        pictures={
            name: draw_picture(drawing.figure) for name, drawing in drawn.items() if isinstance(drawing, Drawing)
        },
    )


def _serve(folder: str, port: int) -> int:
    """Run TensorBoard to its end, or until Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", str(port)]
    with subprocess.Popen(command) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            return 0


def refuse_taken_port(port: int) -> None:
    """Say so where somebody listens on the port already.

    Raises:
        UsageError: the port is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("localhost", port))
        except OSError as error:
            raise UsageError(
                f"port {port} cannot be listened on ({error.strerror}); give another, for example --port {port ^ 1}"
            ) from None


@contextmanager
def _following(run_directory: Path, logs: "ScalarLogs", *, live: bool) -> Iterator[None]:
    """Add new steps of a running job, on a thread of its own, until the block ends; then close the logs."""
    ended = threading.Event()
    thread = threading.Thread(target=follow, args=(run_directory, logs, ended), name="follow", daemon=True)
    if live:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if live:
            thread.join()
        logs.close()


def follow(run_directory: Path, logs: "ScalarLogs", ended: threading.Event) -> None:
    """Add the steps that a job ends, until the job or we end."""
    from dtprof.analysis.timeline.operation_detail import read_detail
    from dtprof.interchange.exporters.tensorboard_logs import append_steps
    from dtprof.job.rank_executor import THIS_PROCESS

    pause_s = AGAIN_AFTER_S
    while not ended.wait(pause_s):
        began_s = time.thread_time()
        try:
            opened = open_run(run_directory, IN_THIS_PROCESS).kept()
            detail = read_detail(opened)
            append_steps(detail, logs)
            if opened.manifest.ended_realtime_ns:
                logs.tell(account_for(opened, partial(summarise_fully, opened, THIS_PROCESS, surveys=detail.surveys)))
                return
        except NotARunError:
            continue  # it is being moved, or its file system is away for a moment
        except OSError as error:
            print(f"dtprof tensorboard: no more steps are added ({error.strerror})", file=sys.stderr)
            return
        pause_s = max(AGAIN_AFTER_S, (time.thread_time() - began_s) / SHARE_OF_A_CORE)
