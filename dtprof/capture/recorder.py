"""The interface of both hooks, and the choice between them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from dtprof import __version__, fence, settings
from dtprof.capture import call_sites
from dtprof.errors import OutputError
from dtprof.records import schema, writer

MOST_SEGMENTS = 2**20
"""4 TiB of log; the native hook takes a 32-bit number."""


class Recorder(Protocol):
    """Writes the events of this process. A handle is opaque; 0 is an event that was not recorded."""

    def install(self, ops: list[str]) -> None:
        """Hook these operators of the c10d namespace."""

    def on_group(self, call: Callable[[int, str], object]) -> None:
        """Call this with id and name of each new process group, to write the facts that only Python knows."""

    def name_id(self, name: str) -> int:
        """Return the id of a phase or sample name, declaring it in the run."""

    def begin_span(self, op: int, is_backward: bool, stage: int = -1, microbatch: int = 0) -> int:
        """Record that a phase, or an action of a pipeline stage on a microbatch, begins."""

    def end_span(self, handle: int, failed: bool, flags: int, is_backward: bool) -> None:
        """Record that it ended."""

    def take_last_operation(self) -> object:
        """Return the last operation that this thread issued on a device since the last call; false without one."""

    def begin_wait(self, operation: Any) -> int:
        """Record that the current stream starts to wait for an operation; `end_span` records its end."""

    def past_span(self, op: int, begin_ns: int, end_ns: int) -> None:
        """Record a phase that has ended, by its times."""

    def sample(self, op: int, value: int) -> None:
        """Record one value now."""

    def device_time(self, group: int, taken_ns: int, duration_ns: int, seen_ns: int) -> None:
        """Record how long an operation took on its device.

        Parameters:
            group: id of its process group.
            taken_ns: when the back end accepted it, within the call, on the host clock.
            duration_ns: its duration on the device.
            seen_ns: when its completion was detected, on the host clock.
        """

    def set_label(self, label: int) -> int:
        """Attribute the operations that this thread issues to a `label` entry, 0 for none; return the label before."""

    def label_next_p2p(self, labels: list[int]) -> None:
        """Label the next point-to-point operations of this thread, in order, instead of the labels still unused."""

    def advance_step(self) -> int:
        """Count an optimizer step and return its number, which later events carry."""

    def write_entry(self, line: str) -> None:
        """Append a line to the strings file."""

    def close_log(self) -> None:
        """Mark the log as complete: the process exits in order."""

    def off(self) -> None:
        """Stop recording in this process."""


def max_segments() -> int:
    """Return how many segments a rank may keep, by the setting; 3 at least."""
    megabytes = settings.parse_number(
        settings.from_environment(settings.MAX_LOG_MB), setting=settings.MAX_LOG_MB, minimum=16
    )
    return min(max(3, int(megabytes * 1024 * 1024) // schema.SEGMENT_SIZE), MOST_SEGMENTS)


def open_recorder(
    *, folder: Path, rank: int, local_rank: int, world_size: int, attempt: int, torch_folder: str, torch_version: str
) -> Recorder:
    """Open the log of this process with the native hook, or the Python hook where that cannot be loaded.

    Raises:
        OSError, OutputError: the log cannot be created.
    """
    # Here, not above: Python processes of a job that never join a group do not pay for loading a library.
    from dtprof.capture.native import loader

    owners = call_sites.code_owners(torch_folder)
    native, reason = loader.load(torch_version)
    header = writer.segment_header(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        attempt=attempt,
        hook=1 if native else 2,
        torch_version=torch_version,
        dtprof_version=__version__,
    )
    if native is None:
        from dtprof.capture.python_hook.dispatcher_hook import PythonHook

        if reason:
            fence.warn_once(reason)
        return PythonHook(folder=folder, header=header, owners=owners, max_segments=max_segments())
    native.configure_sites(list(owners.tool), list(owners.library), list(call_sites.TRANSPARENT))
    try:
        native.open_log(str(folder), header, max_segments())
    except RuntimeError as error:  # what the hook raises names no file
        raise OutputError(f"{folder.parent} cannot be written to ({error})") from error
    recorder: Recorder = native
    return recorder
