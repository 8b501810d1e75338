"""TensorBoard's event files: scalars, histograms, pictures, text and the hyperparameters of a session.

Scalars are written by numpy, many at once; what is rare with the messages of the tensorboard package. Its own writer
takes a checksum byte by byte in Python; neither TensorFlow nor torch is loaded.
"""

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from dtprof.errors import MissingDependencyError
from dtprof.interchange.exporters.protobuf_wire import double, message, number, one_message, one_text, single, write_all
from dtprof.interchange.exporters.tensorboard_records import frame, frame_all
from dtprof.intervals import Column, Floats

FILE_VERSION = "brain.Event:2"
WALL_TIME, STEP, SUMMARY, VALUE, TAG, SIMPLE_VALUE, METADATA = 1, 2, 5, 1, 1, 2, 9
"""Fields of an Event, its Summary and the Values of that."""
SCALARS = "scalars"
"""As tensorboard.plugins.scalar.metadata has it."""
HPARAMS, HPARAMS_VERSION = "hparams", 0
HPARAMS_START, HPARAMS_END = "_hparams_/session_start_info", "_hparams_/session_end_info"
"""As tensorboard.plugins.hparams.metadata has them, which loads a part of TensorFlow's likeness."""
RGB = 3


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


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A picture as the bytes of a PNG, and its size in pixels."""

    png: bytes
    width: int
    height: int


class EventFile:
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
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._described: set[str] = set()
        self._write(self._event(wall_time=time.time(), file_version=FILE_VERSION))

    def __enter__(self) -> "EventFile":
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the remaining events."""
        self._file.close()

    def flush(self) -> None:
        """Write the events added so far."""
        self._file.flush()

    def scalars(
        self,
        steps: Column,
        walls_s: Floats,
        columns: Mapping[str, Floats],
        *,
        descriptions: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Add points of each of these tags, an event a step; nan is no point.

        Parameters:
            descriptions: by tag; stored with the first point of the tag, where TensorBoard looks for it.
        """
        if not len(steps) or not columns:
            return
        tags = list(columns)
        table = np.stack([columns[tag] for tag in tags], axis=1)
        patterns, pattern = np.unique(~np.isnan(table), axis=0, return_inverse=True)
        pattern = pattern.reshape(-1)
        records = np.empty(len(steps), object)
        for place, known in enumerate(patterns):
            rows = np.flatnonzero(pattern == place)
            if not known.any():
                records[rows] = b""
                continue
            known_tags = {tags[at]: table[:, at] for at in np.flatnonzero(known).tolist()}
            metadata_of = {tag: self._describe(tag, descriptions.get(tag, "")) for tag in known_tags}
            # The first point of a tag is in the first row of its pattern.
            for chosen, metadata in ((rows[:1], metadata_of), (rows[1:], dict.fromkeys(metadata_of, b""))):
                values = [
                    piece
                    for tag, column in known_tags.items()
                    for piece in message(
                        VALUE, [one_text(TAG, tag), *single(SIMPLE_VALUE, column[chosen]), metadata[tag]]
                    )
                ]
                event = [*double(WALL_TIME, walls_s[chosen]), *number(STEP, steps[chosen]), *message(SUMMARY, values)]
                records[chosen] = [row.tobytes() for row in frame_all(write_all(event, len(chosen)))]
        self._described |= columns.keys()
        self._file.write(b"".join(records.tolist()))

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

    def text(self, step: int, tag: str, markdown: str) -> None:
        """Add a text."""
        metadata = self._metadata("text")
        tensor = self._tensor(
            dtype="DT_STRING",
            string_val=[markdown.encode()],
            tensor_shape=self._shape(dim=[self._shape.Dim(size=1)]),
        )
        text = self._summary.Summary.Value(tag=f"{tag}/text_summary", metadata=metadata, tensor=tensor)
        self._add(step, time.time(), [text])

    def picture(self, step: int, tag: str, picture: Picture) -> None:
        """Add a picture."""
        image = self._summary.Summary.Image(
            width=picture.width, height=picture.height, colorspace=RGB, encoded_image_string=picture.png
        )
        self._add(step, time.time(), [self._summary.Summary.Value(tag=tag, image=image)])

    def hyperparameters(self, values: Mapping[str, str | float], began_s: float, ended_s: float) -> None:
        """Add a session with these hyperparameters; scalars of the same run are its metrics."""
        data = load("tensorboard.plugins.hparams.plugin_data_pb2")
        success = load("tensorboard.plugins.hparams.api_pb2").Status.Value("STATUS_SUCCESS")
        start = data.SessionStartInfo(start_time_secs=began_s)
        for name, value in values.items():
            if isinstance(value, str):
                start.hparams[name].string_value = value
            else:
                start.hparams[name].number_value = value
        end = data.SessionEndInfo(status=success, end_time_secs=ended_s)
        for tag, content in (
            (HPARAMS_START, data.HParamsPluginData(session_start_info=start, version=HPARAMS_VERSION)),
            (HPARAMS_END, data.HParamsPluginData(session_end_info=end, version=HPARAMS_VERSION)),
        ):
            metadata = self._metadata(HPARAMS, content.SerializeToString())
            self._add(0, began_s, [self._summary.Summary.Value(tag=tag, metadata=metadata)])

    def _describe(self, tag: str, description: str) -> bytes:
        """Return the field that describes a tag, or nothing where it has been described."""
        if not description or tag in self._described:
            return b""
        metadata = self._metadata(SCALARS)
        metadata.summary_description = description
        metadata.data_class = self._summary.DATA_CLASS_SCALAR  # or TensorBoard's data server leaves the text out
        return one_message(METADATA, metadata.SerializeToString())

    def _metadata(self, plugin: str, content: bytes = b"") -> Any:
        data = self._summary.SummaryMetadata.PluginData(plugin_name=plugin, content=content)
        return self._summary.SummaryMetadata(plugin_data=data)

    def _add(self, step: int, wall_s: float, rows: list[Any]) -> None:
        self._write(self._event(wall_time=wall_s, step=step, summary=self._summary.Summary(value=rows)))

    def _write(self, event: Any) -> None:
        self._file.write(frame(event.SerializeToString()))
