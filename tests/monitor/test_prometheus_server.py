"""The metrics in a real Prometheus: scraped, asked for, watched by the alert rules, drawn by the dashboard."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.steps.step_boundaries import find_steps_of
from dtprof.launch.metrics_threads import Metrics, MetricsSettings
from dtprof.monitor.prometheus.metric_catalogue import METRICS
from dtprof.monitor.prometheus.metrics_collector import Collector
from dtprof.monitor.prometheus.node_state import NodeState
from dtprof.records import writer
from dtprof.records.nodes.node_samples import GPU, HOST, Sample
from dtprof.records.reader import open_run
from dtprof.records.shared_follower import SharedFollower
from tests.builders import RankBuilder, write_run
from tests.monitor import prometheus
from tests.monitor.growing import grow

DASHBOARDS = Path(__file__).parents[2] / "dashboards"
ALERTS = DASHBOARDS / "alerts" / "dtprof.yml"
GRAFANA = sorted((DASHBOARDS / "grafana").glob("*.json"))
MS = 1_000_000
HOSTILE = 'eval "50%"\\{a="b"}\n# naïve 名前'
NUM_STEPS = 12
UNITS = {
    r"_celsius\b": "celsius",
    r"_watts\b": "watt",
    r"^topk.*_memory_bytes\b|_held_bytes\b": "bytes",
    r"_operation_bytes_total\b": "Bps",
    r"_operations_\w*total\b": "ops",
    r"_events_total\b": "cps",
    r"_throttled\b": "none",
}
"""Of what panels ask: Grafana's ids of units."""


def state() -> NodeState:
    host = [100.0 + number for number in range(len(HOST))]
    gpus = {0: [float(number) for number in range(len(GPU))]}
    sample = Sample(t_ns=0, host=host, cores=[1.0], gpus=gpus, processes={})
    described = {"memory_bytes": 1000, "gpus": [{"index": 0, "name": "H100", "uuid": "GPU-1", "memory_bytes": 80}]}
    return NodeState(run=HOSTILE, host="node-a", is_hung=True, sample=sample, description=described)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    ranks = [RankBuilder(rank, world_size=2, boot_id=writer.boot_id()) for rank in range(2)]
    for rank in ranks:
        rank.group("1", (0, 1), HOSTILE)
        for step in range(NUM_STEPS):
            begin, late = step * 100 * MS, 10 * MS * rank.rank
            rank.span("backward", begin + 10 * MS, begin + 80 * MS)
            rank.op("all_reduce", begin + 60 * MS + late, begin + 80 * MS, nbytes=4096)
            rank.op("broadcast", begin + 81 * MS, begin + 82 * MS, nbytes=8, group=1, peer=0)
            rank.span(f"phase:{HOSTILE}", begin + 82 * MS, begin + 83 * MS)
            if step == 0:
                rank.sample("step_tokens", 83 * MS, 640)
                rank.sample("step_samples", 83 * MS, 10)
            rank.span("optimizer", begin + 84 * MS, begin + 90 * MS)
            rank.sample("rss_bytes", begin + 90 * MS, 1_000_000 + step)
            rank.sample("parameter_bytes", begin + 90 * MS, 4096)
        rank.op("all_reduce", NUM_STEPS * 100 * MS, nbytes=1, flags=0)
    return write_run(tmp_path_factory.mktemp("runs") / "job", ranks)


def test_what_is_reported_passes_promtool(run: Path) -> None:
    text = Collector(SharedFollower(run, boot_id=None).subscribe(), state=state).collect().decode()
    told = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert told == {metric.name for metric in METRICS}
    assert prometheus.check_metrics(text) == ""


def test_figures_asked_of_prometheus_are_dtprofs_own(run: Path, tmp_path: Path) -> None:
    said: list[str] = []
    growing = grow(run, polls=2)
    next(growing)
    metrics = Metrics.start(
        MetricsSettings(port=0), SharedFollower(run, boot_id=writer.boot_id()), state, say=said.append
    )
    url = said[0].rpartition(" ")[2]
    try:
        target = url.removeprefix("http://").removesuffix("/metrics")
        with prometheus.scraping(tmp_path / "server", target, rules=ALERTS) as server:
            server.wait_for("dtprof_ranks == 2")
            assert list(growing) == [None]
            server.wait_for(f'dtprof_rank_steps_total{{rank="1"}} == {NUM_STEPS}')
            opened = open_run(run)
            steps = [find_steps_of(tables) for tables in opened.load_all()]
            total_s = sum(int(np.diff(own.windows).sum()) for own in steps) / 1e9
            for expression, expected in (
                ("dtprof_step_duration_seconds_sum", total_s),
                ("dtprof_step_duration_seconds_count", sum(len(own.numbers) for own in steps)),
                ('dtprof_step_duration_seconds_bucket{le="0.1"}', 2 * (NUM_STEPS - 1)),
                ('dtprof_step_duration_seconds_bucket{le="0.05"}', 0),
                ('dtprof_rank_steps_total{rank="1"}', NUM_STEPS),
                ('dtprof_operations_total{group="default",op="all_reduce"}', 2 * NUM_STEPS),
                ('dtprof_operation_bytes_total{group="default",op="all_reduce"}', 2 * NUM_STEPS * 4096),
                ('dtprof_operation_wait_seconds_total{group="default",op="all_reduce"}', NUM_STEPS * 0.010),
                ('dtprof_operation_blocked_seconds_total{group="default",op="all_reduce"}', NUM_STEPS * 0.030),
                ('dtprof_operation_duration_seconds_total{group="default",op="all_reduce"}', NUM_STEPS * 0.030),
                ('dtprof_rank_waited_for_seconds_total{rank="1"}', NUM_STEPS * 0.010),
                ('dtprof_rank_waited_for_seconds_total{rank="0"}', 0),
                ('dtprof_open_operations{group="default",op="all_reduce"}', 2),
                ('dtprof_rank_memory_bytes{rank="0",kind="rss"}', 1_000_000 + NUM_STEPS - 1),
                ("dtprof_tokens_total", 2 * NUM_STEPS * 640),
                ("dtprof_samples_total", 2 * NUM_STEPS * 10),
                ("dtprof_hang", 1),
                ('dtprof_gpu_temperature_celsius{gpu="0"}', 7),
            ):
                (sample,) = server.query(expression)
                assert float(sample["value"][1]) == pytest.approx(expected, rel=1e-6), expression
            (info,) = server.query("dtprof_run_info")
            assert info["metric"]["run"] == HOSTILE
            assert HOSTILE in {one["metric"]["phase"] for one in server.query("dtprof_phase_seconds_total")}
            groups = {one["metric"]["group"] for one in server.query("dtprof_operations_total")}
            assert groups == {"default", HOSTILE}
            asked = dict(asked_by_panels())
            assert len(asked) > 30
            answers = {title: _answer(server, expression) for title, expression in asked.items()}
            # Every step takes 100 ms, and of each 10 samples there are 640 tokens.
            for title in ("Step time: ", "Step time: mean"):
                assert answers[title] == pytest.approx([0.1])
            speeds = (asked[f"Tokens and samples: {unit}/s"] for unit in ("tokens", "samples"))
            assert _answer(server, " / ".join(speeds)) == pytest.approx([64])
            _look_at_rules(server)
    finally:
        metrics.stop()


def asked_by_panels() -> Iterator[tuple[str, str]]:
    """Yield what each panel of a dashboard asks, with its title and the legend, and each variable: of all there are."""
    for dashboard in GRAFANA:
        document = json.loads(dashboard.read_text(encoding="utf-8"))
        variables = [one for one in document["templating"]["list"] if one["type"] == "query"]
        asked = {
            f"{panel['title']}: {target['legendFormat']}": target["expr"]
            for panel in document["panels"]
            for target in panel.get("targets", ())
        }
        for variable in variables:
            metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()
            asked[f"variable {variable['name']}"] = f"count by ({label}) ({metric})"
        for title, expression in asked.items():
            for variable in variables:
                expression = expression.replace(f"${variable['name']}", variable.get("allValue", ".*"))
            yield title, expression


def _answer(server: prometheus.Server, asked: str) -> list[float]:
    """Ask this; there is an answer, and it is a number."""
    found = [float(one["value"][1]) for one in server.query(asked)]
    assert found, f"nothing is known of {asked}"
    assert np.isfinite(found).all(), (asked, found)
    return found


def _look_at_rules(server: prometheus.Server) -> None:
    """See that the server runs all rules, that what they compare is there, and that the one of the hang fires."""
    server.wait_for('ALERTS{alertname="DtprofJobHangs", alertstate="firing"}')
    rules = server.rules()
    assert {rule["health"] for rule in rules} == {"ok"}
    assert {rule["name"] for rule in rules if rule["state"] == "firing"} == {"DtprofJobHangs"}
    for rule in rules:
        compared = re.sub(r" (>|==) ", r" \1 bool ", rule["query"])  # answers where it does not hold, too
        assert " bool " in compared
        _answer(server, re.sub(r" offset \w+", "", compared))  # an hour ago there was no server


def test_the_alert_rules_pass_their_unit_tests(tmp_path: Path) -> None:
    promtool = prometheus.find("promtool")
    subprocess.run([promtool, "check", "rules", str(ALERTS)], check=True, timeout=60)
    tests = Path(__file__).with_name("alerts_test.yml").read_text(encoding="utf-8")
    (tmp_path / "tests.yml").write_text(tests.replace("RULES", str(ALERTS)), encoding="utf-8")
    prometheus.run_unit_tests(tmp_path / "tests.yml")
    told = set(re.findall(r"alert: (\w+)", ALERTS.read_text(encoding="utf-8")))
    assert told == set(re.findall(r"Dtprof\w+", tests)), "every rule has a test"


def test_memory_of_each_kind_is_shown_though_one_kind_is_largest_on_all_ranks(tmp_path: Path) -> None:
    expression = dict(asked_by_panels())["Memory of ranks: rank {{rank}} {{kind}}"]
    held = {(rank, kind): number + rank for number, kind in ((10, "rss"), (100, "device")) for rank in range(9)}
    labels = {key: f'dtprof_rank_memory_bytes{{instance="a",kind="{key[1]}",rank="{key[0]}"}}' for key in held}
    expected = [{"labels": labels[key], "value": value} for key, value in held.items() if key[0] > 0]  # 8 of each
    document = {
        "tests": [
            {
                "interval": "1m",
                "input_series": [{"series": labels[key], "values": str(value)} for key, value in held.items()],
                "promql_expr_test": [{"expr": expression, "eval_time": "0m", "exp_samples": expected}],
            }
        ]
    }
    (tmp_path / "tests.yml").write_text(json.dumps(document), encoding="utf-8")
    prometheus.run_unit_tests(tmp_path / "tests.yml")


@pytest.mark.parametrize("file", ["grafana/dtprof.json", "alerts/dtprof.yml"])
def test_dashboard_and_rules_know_no_other_metrics(file: str) -> None:
    text = (DASHBOARDS / file).read_text(encoding="utf-8")
    known = {metric.name for metric in METRICS}
    used = {re.sub(r"_(?:bucket|sum|count)$", "", name) for name in re.findall(r"\bdtprof_\w+", text)}
    assert len(used) > 8
    assert used <= known


def test_a_dashboard_has_a_place_for_each_panel() -> None:
    document = json.loads((DASHBOARDS / "grafana" / "dtprof.json").read_text(encoding="utf-8"))
    panels = document["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = [
        (panel["gridPos"]["x"] + x, panel["gridPos"]["y"] + y)
        for panel in panels
        for x in range(panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["h"])
    ]
    assert len(set(taken)) == len(taken)
    assert max(x for x, _ in taken) == 23
    assert all(panel["description"] for panel in panels if panel["type"] != "row")


def test_what_a_panel_draws_has_its_own_unit() -> None:
    document = json.loads((DASHBOARDS / "grafana" / "dtprof.json").read_text(encoding="utf-8"))
    found = {}
    for panel in document["panels"]:
        for target in panel.get("targets", ()):
            unit = panel["fieldConfig"]["defaults"]["unit"]
            for override in panel["fieldConfig"]["overrides"]:
                if override["matcher"] == {"id": "byFrameRefID", "options": target["refId"]}:
                    unit = next((one["value"] for one in override["properties"] if one["id"] == "unit"), unit)
            for asked, expected in UNITS.items():
                if re.search(asked, target["expr"]):
                    assert unit == expected, (panel["title"], target["expr"])
                    found[asked] = unit
    assert found == UNITS
