"""Prometheus' text format: metrics with their help, type and samples as lines.

The format is version 0.0.4, which Prometheus, its textfile collector, the Pushgateway and OpenTelemetry's collector
read. Standard library only.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
MAX_LABEL_CHARACTERS = 120


@dataclass(frozen=True, kw_only=True)
class Metric:
    """What is told under one name: units are base units and end the name, totals end with `_total`."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many observations there were up to each bound, and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # of each stretch between bounds, the last without an upper one
    total: float


Values = dict[tuple[str, ...], float | Histogram]
"""Of one metric, by the values of its labels."""


@dataclass(frozen=True)
class Samples:
    """The samples of one metric."""

    metric: Metric
    values: Values


def render(samples: Iterable[Samples]) -> str:
    """Return the text; metrics without a sample are left out. Of samples with the same labels the first is told."""
    lines: list[str] = []
    for own in samples:
        if not own.values:
            continue
        metric = own.metric
        lines += [f"# HELP {metric.name} {_escape_help(metric.help)}", f"# TYPE {metric.name} {metric.kind}"]
        told: set[str] = set()
        for values, value in own.values.items():
            labels = dict(zip(metric.labels, values, strict=True))
            if (text := _labels(labels)) in told:
                continue
            told.add(text)
            if isinstance(value, Histogram):
                lines += _histogram(metric.name, labels, value)
            else:
                lines.append(f"{metric.name}{text} {format_value(value)}")
    return "\n".join([*lines, ""])


def _histogram(name: str, labels: Mapping[str, str], histogram: Histogram) -> list[str]:
    lines, count = [], 0
    for bound, own in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        count += own
        lines.append(f"{name}_bucket{_labels({**labels, 'le': format_value(bound)})} {count}")
    lines.append(f"{name}_sum{_labels(labels)} {format_value(histogram.total)}")
    lines.append(f"{name}_count{_labels(labels)} {count}")
    return lines


def format_value(value: float) -> str:
    """Return a number as the format wants it."""
    if value == float("inf"):
        return "+Inf"
    return str(value) if isinstance(value, int) else repr(float(value))


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items()) + "}"


def label_text(name: str) -> str:
    """Return a name as it can be told: cut where it is too long, without what is no character."""
    if len(name) > MAX_LABEL_CHARACTERS:
        name = name[: MAX_LABEL_CHARACTERS - 3] + "..."
    return name.encode("utf-8", "replace").decode("utf-8")  # half of a pair of surrogates cannot be encoded


def _escape(value: str) -> str:
    value = label_text(value)
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _escape_help(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n")
