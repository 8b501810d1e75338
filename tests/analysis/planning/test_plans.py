"""Plans of models on clusters: memory by hand, bubbles by theory, refusals with their reason, and checks of runs."""

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dtprof.analysis.planning.layout_costs import SCHEDULES, Cluster, Layouts, bubble_fractions
from dtprof.analysis.planning.model_shapes import ModelShape, infer_shape, read_shape
from dtprof.analysis.planning.plans import make_plans
from dtprof.analysis.planning.run_calibration import measure_sequence
from dtprof.analysis.results import Throughput
from dtprof.cli.main import main
from dtprof.errors import UsageError
from dtprof.session.engines import make_engine
from dtprof.session.layout_plans import PlanRequest, plan
from tests.builders import RankBuilder, write_run
from tests.report.example_summaries import summary_of as example

GIB = 1 << 30
MODEL = ModelShape(layers=32, hidden=4096, heads=32, kv_heads=8, feed_forward=14_336, vocabulary=128_256, sequence=8192)
CLUSTER = Cluster(
    ranks=64,
    ranks_per_host=8,
    memory_bytes=80 * GIB,
    link_bytes_per_s=200e9,
    network_bytes_per_s=40e9,
    flops_per_s=400e12,
)
OPTIONS = ("params", "sequence", "batch", "ranks", "hosts", "memory", "flops", "link", "network", "top")


def request(**texts: str) -> PlanRequest:
    return PlanRequest(texts={name: texts.get(name) for name in OPTIONS} | {"top": texts.get("top", "20")})


def test_a_llama_of_8b_has_the_parameters_of_its_configuration(tmp_path: Path) -> None:
    config = {
        "num_hidden_layers": 32,
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
        "max_position_embeddings": 8192,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_shape(tmp_path / "config.json")
    assert model == MODEL
    assert model.total_parameters == pytest.approx(8.03e9, rel=0.01)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("model.toml", "[model]\nn_layers = 16\ndim = 2048\nn_heads = 16\n"),
        ("args.sh", "--num-layers 16 \\\n--hidden-size 2048 \\\n--num-attention-heads 16\n"),
        ("args.yaml", "num_layers: 16\nhidden_size: 2048\nnum_attention_heads: 16\n"),
    ],
)
def test_configurations_of_torchtitan_and_megatron_are_read(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    model = read_shape(tmp_path / name, sequence=1024)
    assert (model.layers, model.hidden, model.heads, model.sequence) == (16, 2048, 16, 1024)


def test_state_of_fully_sharded_parameters_is_sixteen_bytes_each_over_all_ranks() -> None:
    (best, *_) = make_plans(MODEL, CLUSTER, batch=64, most=1, only={"fsdp": 64, "tp": 1, "pp": 1, "cp": 1}).plans
    state = sum(best.memory_bytes[name] for name in ("parameters", "gradients", "optimizer_state"))
    # ZeRO-3: 16 P / N.
    assert state == pytest.approx(16 * MODEL.total_parameters / 64, rel=1e-6)
    assert best.fits
    # One sequence of 8192 tokens a rank, in layers that keep 34 values of 16 bits, or rather bytes: sbh(10 + 24).
    layers = 32 * 8192 * 4096 * 34
    assert best.memory_bytes["activations"] == pytest.approx(layers + 8192 * 128_256 * 6, rel=1e-6)


def test_bubbles_are_those_of_theory() -> None:
    count = len(SCHEDULES)
    ones = np.ones(count, np.int64)
    layouts = Layouts(
        dp=ones, fsdp=ones, tp=ones, pp=4 * ones, cp=ones, ep=ones,
        schedule=np.arange(count), microbatches=8 * ones, sequences=np.ones(count),
    )  # fmt: skip
    fractions = dict(zip(SCHEDULES, bubble_fractions(layouts).tolist(), strict=True))
    assert fractions["GPipe"] == fractions["1F1B"] == pytest.approx(3 / 11)
    assert fractions["Interleaved1F1B"] == pytest.approx(3 / (2 * 8 + 3))
    assert fractions["ZB-H1"] == pytest.approx(1 / 9)
    assert fractions["ZBV"] < fractions["ZB-H1"]


def test_layouts_that_cannot_be_are_refused_with_their_reason() -> None:
    found = make_plans(MODEL, CLUSTER, batch=48, most=5)
    reasons = " ".join(refused.reason for refused in found.refused)
    assert "8 of keys) cannot be divided among tp 16" in reasons
    assert "48 sequences cannot be divided among 64 data-parallel ranks" in reasons
    tight = make_plans(MODEL, CLUSTER, batch=64, most=5, only={"dp": 64})
    assert not tight.plans
    assert "of memory; a rank has 80" in tight.refused[0].reason


def test_plans_are_ranked_by_step_time_and_fit() -> None:
    found = make_plans(MODEL, CLUSTER, batch=256, most=50)
    steps = [one.step_ns for one in found.plans if one.step_ns is not None]
    assert steps == sorted(steps)
    assert len(steps) == 50
    assert all(sum(one.memory_bytes.values()) <= 80 * GIB for one in found.plans)
    assert all(one.dp * one.fsdp * one.tp * one.pp * one.cp == 64 for one in found.plans)


def test_ten_thousand_plans_take_less_than_five_seconds() -> None:
    before = time.process_time()
    found = make_plans(infer_shape(70e9), Cluster(**{**vars(CLUSTER), "ranks": 1024}), batch=4096, most=10)
    assert found.considered > 10_000
    assert time.process_time() - before < 5


def test_what_is_not_known_is_not_told() -> None:
    found = plan(request(params="7e9", ranks="8"), make_engine("local"))
    assert found.plans.plans
    assert all(one.step_ns is None and one.fits is None for one in found.plans.plans)
    subjects = {reason.partition(":")[0] for reason in found.plans.cannot_tell}
    assert {"step_ns", "exposed_ns", "fits", "model"} <= subjects


@pytest.mark.parametrize(
    ("texts", "sentence"),
    [
        ({"ranks": "8"}, "the model is not known"),
        ({"params": "7e9"}, "the number of ranks is not known"),
        ({"params": "many", "ranks": "8"}, "--params is 'many'; expected"),
        ({"params": "10", "ranks": "8"}, "--params is 10; expected"),
        ({"params": "7B", "ranks": "0"}, "--ranks is '0'; expected"),
        ({"params": "7B", "ranks": "8", "hosts": "3"}, "--hosts is 3"),
        ({"params": "7B", "ranks": "8", "memory": "80"}, "--memory is '80'; expected a size with its unit"),
        ({"params": "7B", "ranks": "8", "flops": "-1"}, "--flops is '-1'; expected"),
    ],
)
def test_impossible_requests_are_refused(texts: dict[str, str], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence.replace("(", r"\(")):
        plan(request(**texts), make_engine("local"))


def test_a_configuration_without_sizes_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(UsageError, match="has no layers, heads; expected"):
        read_shape(tmp_path / "config.json")


def test_the_plan_of_a_run_says_how_far_it_was_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank in ranks:
        rank.group("1", range(2), "dp")
        for step in range(5):
            rank.span("forward", 1000 * step, 1000 * step + 300)
            rank.span("backward", 1000 * step + 300, 1000 * step + 900)
            rank.span("optimizer", 1000 * step + 900, 1000 * step + 1000)
    folder = write_run(tmp_path / "run", ranks)
    status = main(["plan", "--params", "1e6", "--flops", "1", "--from", str(folder), "--check", str(folder), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert status == 0
    assert document["schema"] == 1
    (step,) = [one for one in document["check"] if one["figure"] == "step_ns"]
    assert step["measured"] == 1000
    assert step["off"] is None or step["off"] == pytest.approx(step["planned"] / 1000 - 1)


@pytest.mark.parametrize(
    ("tokens", "samples", "sequence"),
    [(3_840.0, 24.0, 160), (3_840.0, None, None), (None, 24.0, None)],  # 3,840 / 24 = 160
)
def test_a_sequence_has_the_tokens_of_a_step_over_its_samples(
    tokens: float | None, samples: float | None, sequence: int | None
) -> None:
    throughput = Throughput(
        tokens_per_step=tokens,
        samples_per_step=samples,
        tokens_per_s=tokens,
        samples_per_s=samples,
        mean_tokens_per_s=tokens,
        mean_samples_per_s=samples,
        first_step=2,
        tokens_per_s_of_steps=(),
        samples_per_s_of_steps=(),
    )
    assert measure_sequence([replace(example(), throughput=throughput)]) == sequence
