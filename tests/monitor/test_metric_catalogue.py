"""Names of metrics follow the conventions of Prometheus."""

import re

from dtprof.interchange.metric_families import COUNTER
from dtprof.monitor.prometheus.metric_catalogue import METRICS


def test_names_follow_the_conventions() -> None:
    units = ("_seconds", "_bytes", "_ratio", "_celsius", "_watts", "_joules", "_hertz")
    wrong_units = ("_ms", "_ns", "_us", "_mb", "_gib", "_percent", "_mhz")
    assert len({metric.name for metric in METRICS}) == len(METRICS) > 40
    for metric in METRICS:
        assert re.fullmatch(r"dtprof_[a-z][a-z0-9_]*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == COUNTER), metric.name
        plain = metric.name.removesuffix("_total")
        assert not plain.endswith(wrong_units)
        assert metric.help.endswith(".")
        if any(unit in f"{plain}_" for unit in (f"{unit}_" for unit in units)):
            assert plain.endswith(units), metric.name
