"""The page of metrics for Prometheus lists what is told."""

from tests.docs import embedded_metrics
from tests.docs.pages import load


def test_every_metric_is_listed_as_declared() -> None:
    page = load("docs/reference/prometheus.md").text
    assert "`dtprof_hang`" in page
    assert page == embedded_metrics.refresh(page), "run: python -m tests.docs.embedded_metrics"
