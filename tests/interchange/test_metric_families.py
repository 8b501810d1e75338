"""Prometheus' text format: names, values and labels, hostile ones too."""

import re

from hypothesis import given
from hypothesis import strategies as st

from dtprof.interchange.metric_families import COUNTER, GAUGE, HISTOGRAM, DeclaredMetric, Histogram, exposition

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
    waits = DeclaredMetric(name="wait_seconds_total", kind=COUNTER, help="Time waited.", labels=("group",))
    empty = DeclaredMetric(name="empty", kind=GAUGE, help="Nothing.")
    assert exposition([waits.family({("dp",): 1.5, ("tp",): 2}), empty.family({})]).decode() == (
        "# HELP wait_seconds_total Time waited.\n# TYPE wait_seconds_total counter\n"
        'wait_seconds_total{group="dp"} 1.5\nwait_seconds_total{group="tp"} 2.0\n'
    )


def test_buckets_of_a_histogram_add_up() -> None:
    steps = DeclaredMetric(name="step_seconds", kind=HISTOGRAM, help="Steps.")
    text = exposition([steps.family({(): Histogram(bounds=(0.1, 1.0), counts=(2, 3, 1), total=4.25)})]).decode()
    assert [(name, labels.get("le"), value) for name, labels, value in parse(text)] == [
        ("step_seconds_bucket", "0.1", 2),
        ("step_seconds_bucket", "1.0", 5),
        ("step_seconds_bucket", "+Inf", 6),
        ("step_seconds_count", None, 6),
        ("step_seconds_sum", None, 4.25),
    ]


@given(st.text(max_size=100))
def test_any_name_comes_back_from_its_label(name: str) -> None:
    phase = DeclaredMetric(name="phase", kind=GAUGE, help="x", labels=("phase",))
    ((_, labels, _),) = parse(exposition([phase.family({(name,): 1})]).decode())
    assert labels["phase"] == name.encode("utf-8", "replace").decode()


def test_a_name_that_is_too_long_is_cut() -> None:
    phase = DeclaredMetric(name="phase", kind=GAUGE, help="x", labels=("phase",))
    ((_, labels, _),) = parse(exposition([phase.family({("a" * 1000,): 1})]).decode())
    assert labels["phase"] == "a" * 117 + "..."
