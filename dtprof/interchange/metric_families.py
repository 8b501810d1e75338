"""Declared metrics and their samples as metric families of prometheus_client, and the text that Prometheus reads.

Prometheus, its textfile collector, the Pushgateway and OpenTelemetry's collector read version 0.0.4 of the text format.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
MAX_LABEL_CHARACTERS = 120


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """How many observations there were up to each bound, and their sum."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]  # of each stretch between bounds, the last without an upper one
    total: float

    def buckets(self) -> list[tuple[str, float]]:
        """Return the upper bounds with the observations up to each."""
        bounds = map(floatToGoString, (*self.bounds, float("inf")))
        return list(zip(bounds, accumulate(self.counts), strict=True))


Values = Mapping[tuple[str, ...], float | Histogram]
"""Of one metric, by the values of its labels."""


@dataclass(frozen=True, kw_only=True)
class DeclaredMetric:
    """One name that is exposed: units are base units and end the name, totals end with `_total`."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()

    def family(self, values: Values) -> Metric:
        """Return the metric with its samples; of samples whose labels read alike the first counts."""
        distinct: dict[tuple[str, ...], float | Histogram] = {}
        for labels, value in values.items():
            distinct.setdefault(tuple(map(label_text, labels)), value)
        if self.kind == HISTOGRAM:
            histogram = HistogramMetricFamily(self.name, self.help, labels=self.labels)
            for labels, value in distinct.items():
                assert isinstance(value, Histogram)
                histogram.add_metric(labels, buckets=value.buckets(), sum_value=value.total)
            return histogram
        made = (CounterMetricFamily if self.kind == COUNTER else GaugeMetricFamily)(
            self.name, self.help, labels=self.labels
        )
        for labels, value in distinct.items():
            assert not isinstance(value, Histogram)
            made.add_metric(labels, value)
        return made

    def single(self, value: float | None, *labels: str) -> Metric:
        """Return the metric with one sample, or with none where the value is not known."""
        return self.family({} if value is None else {labels: value})


class _Families(Collector):
    """Gives a registry families that are there already."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Return the families with a sample: an unknown figure has no lines."""
        return (family for family in self._families if family.samples)


def exposition(families: Iterable[Metric]) -> bytes:
    """Return families as text."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


def label_text(name: str) -> str:
    """Return a name as a label value: cut where it is too long, without invalid characters."""
    if len(name) > MAX_LABEL_CHARACTERS:
        name = name[: MAX_LABEL_CHARACTERS - 3] + "..."
    return name.encode("utf-8", "replace").decode("utf-8")  # half of a pair of surrogates cannot be encoded
