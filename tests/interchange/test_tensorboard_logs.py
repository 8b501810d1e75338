"""The log directory, read back by TensorBoard's own event reader."""

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtprof.analysis.metric_registry import tooltips_of
from dtprof.analysis.results import EXPOSED_PARTS, Summary
from dtprof.analysis.timeline.operation_detail import RunDetail, read_detail, read_ranks
from dtprof.errors import MissingDependencyError
from dtprof.interchange.exporters.tensorboard_events import EventFile, Picture
from dtprof.interchange.exporters.tensorboard_logs import (
    ALL_RANKS,
    Account,
    RankSeries,
    ScalarLogs,
    rank_series,
    read_shown,
    write_tensorboard,
)
from dtprof.job.rank_executor import THIS_PROCESS
from dtprof.records.reader import Run
from dtprof.session.tensorboard_view import write_logs

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
    from tensorboard.compat.proto.summary_pb2 import DATA_CLASS_SCALAR
    from tensorboard.plugins.hparams import metadata as hparams

PICTURE = Picture(png=b"png", width=20, height=10)
pytestmark = pytest.mark.filterwarnings("ignore")


def load(folder: Path) -> Any:
    events = EventAccumulator(str(folder), size_guidance={"histograms": 0, "scalars": 0, "tensors": 0})
    events.Reload()
    return events


def points(events: Any, tag: str) -> dict[int, float]:
    return {row.step: row.value for row in events.Scalars(tag)}


@pytest.fixture(scope="module")
def folder(detail: RunDetail, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("tensorboard")
    account = Account(texts={"verdict": "all is *well*"}, pictures={"step_parts": PICTURE})
    logs, said = write_tensorboard(read_shown(detail), out, account=lambda: account)
    logs.close()
    assert said == []
    return out


def test_scalars_of_each_rank_are_the_figures_of_the_summary(folder: Path, summary: Summary, used: range) -> None:
    for rank in summary.ranks:
        events = load(folder / f"rank {rank.rank:05}")
        assert rank.partition_ns is not None
        assert rank.step_ns is not None
        figures = {"step_ms": rank.step_ns, "exposed_ms": sum(rank.partition_ns[p] for p in EXPOSED_PARTS)}
        figures |= {f"parts_ms/{part}": ns for part, ns in rank.partition_ns.items()}
        for tag, ns in figures.items():
            values = points(events, tag)
            assert set(values) >= set(used)
            assert np.mean([values[step] for step in used]) == pytest.approx(ns / 1e6, rel=1e-6, abs=1e-5), tag


def test_all_ranks_together_have_medians_extremes_a_spread_a_text_and_the_layout(
    folder: Path, summary: Summary, used: range
) -> None:
    events = load(folder / ALL_RANKS)
    steps = {series.rank: dict(enumerate(series.duration_ns, series.first_step)) for series in summary.step_series}
    for tag, combine in (("step_ms", np.median), ("step_slowest_ms", np.max), ("step_fastest_ms", np.min)):
        values = points(events, tag)
        for step in used:
            expected = combine([own[step] for own in steps.values()])
            assert values[step] == pytest.approx(expected / 1e6, rel=1e-6)
    spread = {row.step: row.histogram_value for row in events.Histograms("step_over_ranks_ms")}
    assert spread[used[0]].num == 8
    assert spread[used[0]].max == pytest.approx(max(own[used[0]] for own in steps.values()) / 1e6)
    (text,) = events.Tensors("verdict/text_summary")
    assert text.tensor_proto.string_val == [b"all is *well*"]
    (image,) = events.Images("step_parts")
    assert (image.encoded_image_string, image.width, image.height) == (b"png", 20, 10)
    content = events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    layout = hparams.parse_session_start_info_plugin_data(content).hparams
    assert {name: layout[name].number_value for name in ("world_size", "size_dp", "size_tp", "size_pp")} == {
        "world_size": 8,
        "size_dp": 2,
        "size_tp": 2,
        "size_pp": 2,
    }


def test_every_scalar_of_the_commands_log_is_described(run: Run, out: Path) -> None:
    logs, _ = write_logs(run, out, THIS_PROCESS)
    logs.close()
    for name, before in (("rank 00000", ""), (ALL_RANKS, "Median over ranks. ")):
        events = load(out / name)
        told = {tag: events.SummaryMetadata(tag).summary_description for tag in events.Tags()["scalars"]}
        assert all(told.values())
        for part, definition in tooltips_of("step_parts").items():
            if f"parts_ms/{part}" in told:
                assert told[f"parts_ms/{part}"] == before + definition
        assert told["step_ms"] == before + "From the end of one step to the end of the next."


def test_a_description_stands_with_the_first_point_of_its_tag_only(out: Path) -> None:
    late = np.array([np.nan, 1.0, 2.0])
    with EventFile(out) as log:
        for first in (1, 4):
            columns = {"early": np.array([1.0, 2.0, 3.0]), "late": late}
            log.scalars(np.arange(first, first + 3), np.zeros(3), columns, descriptions={"late": "comes late"})
    (file,) = out.iterdir()
    values = [value for event in EventFileLoader(str(file)).Load() for value in event.summary.value]
    assert [v.metadata.summary_description for v in values if v.tag == "late"] == ["comes late", "", "", ""]
    assert {v.metadata.data_class for v in values if v.metadata.summary_description} == {DATA_CLASS_SCALAR}
    assert [v.metadata.summary_description for v in values if v.tag == "early"] == [""] * 6
    assert points(load(out), "late") == {2: 1.0, 3: 2.0, 5: 1.0, 6: 2.0}


def test_a_quantity_that_some_steps_lack_has_points_in_the_others_only(run: Run, out: Path) -> None:
    numbers = np.arange(1, 6)
    columns = {"step_ms": numbers * 1.5, "memory_bytes/rss": np.array([np.nan, 7.0, np.nan, np.nan, 9.0])}
    series = [RankSeries(rank=0, numbers=numbers, ended_s=numbers + 0.25, columns=columns)]
    logs = ScalarLogs(folder=out)
    logs.append(read_detail(run), series)
    logs.close()
    events = load(out / "rank 00000")
    assert points(events, "memory_bytes/rss") == {2: 7.0, 5: 9.0}
    assert [(row.wall_time, row.step, row.value) for row in events.Scalars("step_ms")] == [
        (step + 0.25, step, step * 1.5) for step in range(1, 6)
    ]


def test_everything_can_be_read_while_more_may_come(detail: RunDetail, out: Path) -> None:
    logs, _ = write_tensorboard(read_shown(detail), out, account=lambda: Account(texts={"verdict": "well"}))
    events = load(out / ALL_RANKS)
    assert len(events.Tensors("verdict/text_summary")) == 1
    assert events.SummaryMetadata(hparams.SESSION_START_INFO_TAG).plugin_data.content
    assert len(points(load(out / "rank 00007"), "step_ms")) == len(detail.steps[7].numbers)
    logs.close()


def test_a_trace_of_each_rank_lies_beside(folder: Path) -> None:
    assert len(list((folder / "traces").glob("*.pt.trace.json.gz"))) == 8


def series_of(last: int, ranks: int = 2) -> Sequence[RankSeries]:
    numbers = np.arange(2, last + 1)
    return [
        RankSeries(rank=rank, numbers=numbers, ended_s=np.zeros(len(numbers)), columns={"step_ms": numbers * 1.0})
        for rank in range(ranks)
    ]


def test_what_a_running_job_comes_to_is_added_once_all_ranks_have_it(run: Run, out: Path) -> None:
    detail = read_detail(run)
    logs = ScalarLogs(folder=out)
    logs.append(detail, series_of(5))
    logs.append(detail, [series_of(9)[0], series_of(7)[1]])
    logs.append(detail, series_of(7))
    logs.close()
    for name in ("rank 00000", "rank 00001", ALL_RANKS):
        values = load(out / name).Scalars("step_ms")
        assert [(row.step, row.value) for row in values] == [(step, float(step)) for step in range(2, 8)]


def test_of_a_long_run_every_nth_step_is_a_point_and_it_is_said(run: Run, out: Path) -> None:
    logs = ScalarLogs(folder=out)
    said = logs.append(read_detail(run), series_of(5_000))
    logs.close()
    assert said[0] == "one step in 5 of 5,000 is a point of the scalars"
    values = load(out / "rank 00000").Scalars("step_ms")
    assert len(values) == 1000
    assert values[-1].step == 5_000


def test_memory_of_a_step_is_its_largest_sample(run: Run) -> None:
    detail = read_detail(run)
    rank = next(iter(read_ranks(detail)))
    series = rank_series(rank)
    name = next(tag for tag in series.columns if tag.startswith("memory_bytes/"))
    samples = rank.tables.samples
    op = rank.tables.ops.index(name.removeprefix("memory_bytes/") + "_bytes")
    for row, (begin, end) in enumerate(rank.steps.windows.tolist()):
        own = samples[(samples["op"] == op) & (samples["t_ns"] >= begin) & (samples["t_ns"] <= end)]
        assert series.columns[name][row] == own["value"].max()


def test_without_tensorboard_the_extra_is_named(detail: RunDetail, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    with pytest.raises(MissingDependencyError, match=r"dtprof\[tensorboard\]"):
        write_tensorboard(read_shown(detail), out)


def test_without_the_plugin_the_extra_is_named_and_all_is_written(
    detail: RunDetail, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, said = write_tensorboard(read_shown(detail), out / "with")
    logs.close()
    assert said == []
    monkeypatch.setattr("dtprof.interchange.exporters.tensorboard_logs.find_spec", {"torch_tb_profiler": None}.get)
    logs, said = write_tensorboard(read_shown(detail), out / "without")
    logs.close()
    assert [sentence for sentence in said if "pip install 'dtprof[tensorboard]'" in sentence] == said
    assert len(said) == 1
    names = [{file.name for file in (out / kind / "traces").iterdir()} for kind in ("with", "without")]
    assert names[0] == names[1] != set()
