"""The summary logged to a tracker; modules that stand for wandb and mlflow keep what they are given."""

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import dtprof
from dtprof.analysis.results import PARTS, PipelineResult
from dtprof.api.trackers import describe
from dtprof.errors import MissingDependencyError, NotARunError
from tests.analysis.noisy_runs import build_ranks
from tests.builders import write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "run", build_ranks(1))


class WandbRun:
    """A run of wandb: what was configured and summarised."""

    def __init__(self) -> None:
        self.summary: dict[str, float] = {}
        self.settings: dict[str, Any] = {}
        self.config = self

    def update(self, settings: dict[str, Any], *, allow_val_change: bool) -> None:
        assert allow_val_change
        self.settings |= settings


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("wandb")
    module.run = WandbRun()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_figures_are_those_of_the_summary(run: Path, wandb: Any) -> None:
    assert dtprof.log_to("wandb", run)
    summary = dtprof.open_run(run).summary()
    figures = wandb.run.summary
    assert summary.steps.duration_ns is not None
    assert figures["dtprof/step_median_ms"] == summary.steps.duration_ns.median / 1e6
    total = sum(rank.step_ns or 0 for rank in summary.ranks)
    for part in PARTS:
        spent = sum((rank.partition_ns or {})[part] for rank in summary.ranks)
        assert figures[f"dtprof/share/{part}"] == pytest.approx(spent / total)
    assert sum(figures[f"dtprof/share/{part}"] for part in PARTS) == pytest.approx(1)
    assert wandb.run.settings["dtprof/world_size"] == summary.world_size


def test_the_schedule_of_a_pipeline_goes_to_the_configuration(run: Path) -> None:
    summary = dtprof.open_run(run).summary()
    assert "dtprof/schedule" not in describe(summary)
    pipeline = PipelineResult(
        schedule="1F1B",
        stages=2,
        ranks=2,
        microbatches=4,
        bubble_fraction=0.2,
        theory_fraction=0.2,
        parts=None,
        per_rank=(),
    )
    told = describe(replace(summary, pipeline=pipeline))
    assert (told["dtprof/schedule"], told["dtprof/microbatches"]) == ("1F1B", 4)


class Mlflow(ModuleType):
    """Stands for mlflow with one run, which refuses to change a parameter."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.metrics: dict[str, float] = {}
        self.params: dict[str, str] = {}
        self.tags: dict[str, str] = {}

    def active_run(self) -> SimpleNamespace:
        return self.get_run("7")

    def get_run(self, run_id: str) -> SimpleNamespace:
        assert run_id == "7"
        return SimpleNamespace(info=SimpleNamespace(run_id="7"), data=SimpleNamespace(params=dict(self.params)))

    def log_metrics(self, metrics: dict[str, float]) -> None:
        self.metrics |= metrics

    def log_params(self, params: dict[str, object]) -> None:
        for name, value in params.items():
            if self.params.setdefault(name, str(value)) != str(value):
                raise RuntimeError(f"Changing param values is not allowed: {name}")

    def set_tags(self, tags: dict[str, object]) -> None:
        self.tags |= {name: str(value) for name, value in tags.items()}


def test_mlflow_gets_metrics_and_parameters_and_of_a_job_that_was_restarted_new_metrics(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Mlflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    assert dtprof.log_to("mlflow", run)
    assert module.metrics["dtprof/dropped_events"] == 0.0
    assert module.params["dtprof/run"] == str(run)
    module.metrics.clear()
    again = write_run(tmp_path / "again", build_ranks(1))
    assert dtprof.log_to("mlflow", again)
    assert module.metrics["dtprof/dropped_events"] == 0.0
    assert (module.params["dtprof/run"], module.tags["dtprof/run"]) == (str(run), str(again))


def test_in_a_job_nothing_is_raised(
    run: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("DTPROF_RUN_DIR", raising=False)
    assert not dtprof.log_to("wandb")  # not recorded: without effect
    assert capfd.readouterr().err == ""
    monkeypatch.setenv("DTPROF_RUN_DIR", str(run))
    assert dtprof.log_to("wandb")
    assert wandb.run.summary

    def refuse(*_given: object, **_options: object) -> None:
        raise ConnectionError("no network")

    monkeypatch.setattr(wandb.run, "update", refuse)
    assert not dtprof.log_to("wandb")
    said = capfd.readouterr().err
    assert said == "dtprof: dtprof.log_to did not log the summary: ConnectionError: no network\n"
    wandb.run = None
    assert not dtprof.log_to("wandb")
    assert not dtprof.log_to("comet")
    monkeypatch.setenv("DTPROF_RUN_DIR", str(run / "nothing"))
    assert not dtprof.log_to("wandb")
    said = capfd.readouterr().err
    for sentence in ("no active run; call wandb.init()", "expected one of wandb, mlflow", "does not exist"):
        assert sentence in said


@pytest.mark.usefixtures("wandb")
def test_after_the_job_errors_are_raised(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotARunError):
        dtprof.log_to("wandb", run / "nothing")
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(MissingDependencyError, match="pip install wandb"):
        dtprof.log_to("wandb", run)
