"""Prometheus' text format: names, values and labels, hostile ones too."""

import re

from hypothesis import given
from hypothesis import strategies as st

from dtprof.interchange.prometheus_text import COUNTER, GAUGE, HISTOGRAM, Histogram, Metric, Samples, render
from dtprof.monitor.prometheus.metric_catalogue import METRICS

LINE = re.compile(r'(?P<name>[a-z_]+)(?:\{(?P<labels>(?:[a-z]+="(?:[^"\\\n]|\\["\\n])*",?)+)\})? (?P<value>\S+)')
LABEL = re.compile(r'([a-z]+)="((?:[^"\\\n]|\\["\\n])*)"')


def parse(text: str) -> list[tuple[str, dict[str, str], float]]:
    """Return the samples of a text by the grammar of the format."""
    found = []
    for line in text.split("\n"):
        if line and not line.startswith("#"):
            parts = LINE.fullmatch(line)
            assert parts is not None, line
            labels = dict(LABEL.findall(parts["labels"] or ""))
            plain = {k: re.sub(r"\\(.)", lambda m: "\n" if m[1] == "n" else m[1], v) for k, v in labels.items()}
            found.append((parts["name"], plain, float(parts["value"])))
    return found


def test_help_type_and_samples_are_lines_of_their_own() -> None:
    waits = Metric(name="wait_seconds_total", kind=COUNTER, help="Time waited.", labels=("group",))
    empty = Metric(name="empty", kind=GAUGE, help="Nothing.")
    assert render([Samples(waits, {("dp",): 1.5, ("tp",): 2}), Samples(empty, {})]) == (
        "# HELP wait_seconds_total Time waited.\n# TYPE wait_seconds_total counter\n"
        'wait_seconds_total{group="dp"} 1.5\nwait_seconds_total{group="tp"} 2\n'
    )


def test_buckets_of_a_histogram_add_up() -> None:
    steps = Metric(name="step_seconds", kind=HISTOGRAM, help="Steps.")
    text = render([Samples(steps, {(): Histogram(bounds=(0.1, 1.0), counts=(2, 3, 1), total=4.25)})])
    assert [(name, labels.get("le"), value) for name, labels, value in parse(text)] == [
        ("step_seconds_bucket", "0.1", 2),
        ("step_seconds_bucket", "1.0", 5),
        ("step_seconds_bucket", "+Inf", 6),
        ("step_seconds_sum", None, 4.25),
        ("step_seconds_count", None, 6),
    ]


@given(st.text(max_size=100))
def test_any_name_comes_back_from_its_label(name: str) -> None:
    phase = Metric(name="phase", kind=GAUGE, help="x", labels=("phase",))
    ((_, labels, _),) = parse(render([Samples(phase, {(name,): 1})]))
    assert labels["phase"] == name.encode("utf-8", "replace").decode()


def test_a_name_that_is_too_long_is_cut() -> None:
    phase = Metric(name="phase", kind=GAUGE, help="x", labels=("phase",))
    ((_, labels, _),) = parse(render([Samples(phase, {("a" * 1000,): 1})]))
    assert labels["phase"] == "a" * 117 + "..."


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
