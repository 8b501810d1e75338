"""TensorBoard's event files: scalars, histograms, text and the hyperparameters of a session.

Written with the classes of the tensorboard package alone; neither TensorFlow nor torch is loaded.
"""

import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.errors import MissingDependencyError

QUEUE, FLUSH_S = 1000, 10


def load(module: str) -> Any:
    """Import a part of tensorboard.

    Raises:
        MissingDependencyError: tensorboard is not installed.
    """
    try:
        return import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            "tensorboard is not installed, and is needed for this; pip install 'dtprof[tensorboard]'"
        ) from error


class EventLog:
    """The event file of one folder, which TensorBoard shows as one run."""

    def __init__(self, folder: Path) -> None:
        """Begin a file.

        Raises:
            MissingDependencyError: tensorboard is not installed.
        """
        self._event = load("tensorboard.compat.proto.event_pb2").Event
        self._summary = load("tensorboard.compat.proto.summary_pb2")
        self._tensor = load("tensorboard.compat.proto.tensor_pb2").TensorProto
        self._shape = load("tensorboard.compat.proto.tensor_shape_pb2").TensorShapeProto
        writer = load("tensorboard.summary.writer.event_file_writer").EventFileWriter
        folder.mkdir(parents=True, exist_ok=True)
        self._writer = writer(str(folder), max_queue_size=QUEUE, flush_secs=FLUSH_S)

    def __enter__(self) -> "EventLog":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is left."""
        self._writer.close()

    def flush(self) -> None:
        """Write what was added so far."""
        self._writer.flush()

    def scalars(self, step: int, wall_s: float, values: Mapping[str, float]) -> None:
        """Add one point of each of these tags."""
        rows = [self._summary.Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._add(step, wall_s, rows)

    def histogram(self, step: int, wall_s: float, tag: str, values: npt.NDArray[np.float64]) -> None:
        """Add how values are spread."""
        counts, edges = np.histogram(values, bins=min(30, max(1, len(values))))
        histogram = self._summary.HistogramProto(
            min=float(values.min()),
            max=float(values.max()),
            num=len(values),
            sum=float(values.sum()),
            sum_squares=float((values**2).sum()),
            bucket_limit=edges[1:].tolist(),
            bucket=counts.tolist(),
        )
        self._add(step, wall_s, [self._summary.Summary.Value(tag=tag, histo=histogram)])

    def text(self, tag: str, markdown: str) -> None:
        """Add a text."""
        metadata = self._metadata("text")
        tensor = self._tensor(
            dtype="DT_STRING",
            string_val=[markdown.encode()],
            tensor_shape=self._shape(dim=[self._shape.Dim(size=1)]),
        )
        self._add(
            0, time.time(), [self._summary.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)]
        )

    def hyperparameters(self, values: Mapping[str, str | float], began_s: float, ended_s: float) -> None:
        """Add a session with these hyperparameters; scalars of the same run are its metrics."""
        names = load("tensorboard.plugins.hparams.metadata")
        data = load("tensorboard.plugins.hparams.plugin_data_pb2")
        success = load("tensorboard.plugins.hparams.api_pb2").Status.Value("STATUS_SUCCESS")
        start = data.SessionStartInfo(start_time_secs=began_s)
        for name, value in values.items():
            if isinstance(value, str):
                start.hparams[name].string_value = value
            else:
                start.hparams[name].number_value = value
        end = data.SessionEndInfo(status=success, end_time_secs=ended_s)
        version = names.PLUGIN_DATA_VERSION
        for tag, content in (
            (names.SESSION_START_INFO_TAG, data.HParamsPluginData(session_start_info=start, version=version)),
            (names.SESSION_END_INFO_TAG, data.HParamsPluginData(session_end_info=end, version=version)),
        ):
            metadata = self._metadata(names.PLUGIN_NAME, content.SerializeToString())
            self._add(0, began_s, [self._summary.Summary.Value(tag=tag, metadata=metadata)])

    def _metadata(self, plugin: str, content: bytes = b"") -> Any:
        data = self._summary.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        return self._summary.SummaryMetadata(plugin_data=data)

    def _add(self, step: int, wall_s: float, rows: list[Any]) -> None:
        summary = self._summary.Summary(value=rows)
        self._writer.add_event(self._event(wall_time=wall_s, step=step, summary=summary))
