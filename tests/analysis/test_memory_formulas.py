"""What a rank holds beside what it should hold by formula, and what is left of the memory of its node."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtprof.analysis.memory.memory_formulas import (
    ModelShare,
    activation_bytes,
    find_share,
    list_labelled,
    state_by_scheme,
)
from dtprof.analysis.results import Summary
from dtprof.analysis.run_summary import summarise
from dtprof.records.nodes.node_memory import MOST_LINES, read_node_memory
from dtprof.records.nodes.node_samples import GPU, HOST, Sample, SampleFile
from dtprof.records.sites import Label, Site
from dtprof.records.tables import NodeMemory, Sharding
from dtprof.report.documents.summary_json import summary_json
from dtprof.report.text.summary_text import summary_text
from tests.builders import MemoryRun, RankBuilder

P = 1_000_000
UNKNOWN_GRADIENTS = -1


def holding(
    operations: Sequence[tuple[str, str, str]] = (),
    *,
    parameters: int,
    gradients: int | None = None,
    state: int,
    world_size: int = 4,
    nbytes: int = 0,
    dtype: str = "float32",
    axis: str = "",
) -> Summary:
    """Summarise a run of ranks that hold so much and issue operations: name, api of the label, what it is for."""
    ranks = [RankBuilder(i, world_size=world_size) for i in range(world_size)]
    for rank in ranks:
        if axis:
            rank.group("1", range(world_size), f"mesh_{axis}")
        for number, (name, api, text) in enumerate(operations):
            module = text.rpartition(" of ")[2]
            rank.sites[number + 1] = Site(
                file="train.py", line=1, function="f", label=Label(api=api, text=text, module=module)
            )
            rank.op(name, 100 * number, 100 * number + 50, site=number + 1, nbytes=nbytes, dtype=dtype)
        rank.sample("peak_rss_bytes", 10_000, 100 * P)
        rank.sample("parameter_bytes", 10_000, parameters)
        if gradients != UNKNOWN_GRADIENTS:
            rank.sample("gradient_bytes", 10_000, parameters if gradients is None else gradients)
        rank.sample("optimizer_state_bytes", 10_000, state)
        rank.sample("activation_bytes", 10_000, 7 * P)
        rank.sample("communication_bytes", 10_000, P)
    return summarise(MemoryRun(ranks))


def test_formulas_are_those_of_zero() -> None:
    # 32-bit Adam, P parameters, 4 ranks: 16P; 8P + 8P/4; 4P + 12P/4; 16P/4
    assert state_by_scheme(4 * P, 4, is_mixed=False) == {
        "none": 16 * P,
        "zero1": 10 * P,
        "zero2": 7 * P,
        "zero3": 4 * P,
    }
    # 16-bit parameters, 32-bit state: 16P; 4P + 12P/4; 2P + 14P/4; 16P/4
    mixed = {"none": 16 * P, "zero1": 7 * P, "zero2": 5_500_000, "zero3": 4 * P}
    assert state_by_scheme(2 * P, 4, is_mixed=True) == mixed


@pytest.mark.parametrize(
    ("operations", "scheme", "parameters", "state", "expected"),
    [
        ([("all_reduce", "ddp", "ddp bucket 0, 4 MiB")], "none", 4 * P, 8 * P, 16 * P),
        ([("broadcast", "zero", "zero broadcast of parameters")], "zero1", 4 * P, 2 * P, 10 * P),
        (
            [("all_gather", "fsdp", "fsdp all-gather of layers.0")] * 2
            + [("reduce_scatter", "fsdp", "fsdp reduce-scatter of layers.0")],
            "zero3",
            P,
            2 * P,
            4 * P,
        ),
        (
            [
                ("all_gather", "fsdp", "fsdp all-gather of layers.0"),
                ("reduce_scatter", "fsdp", "fsdp reduce-scatter of layers.0"),
            ],
            "zero2",
            P,
            2 * P,
            7 * P,
        ),
    ],
)
def test_state_stands_beside_the_formula_of_how_it_is_spread(
    operations: list[tuple[str, str, str]], scheme: str, parameters: int, state: int, expected: int
) -> None:
    summary = holding(operations, parameters=parameters, state=state)
    formula = summary.ranks[0].memory_formula
    assert formula is not None
    assert (formula.scheme, formula.shards, formula.state_formula_bytes) == (scheme, 4, expected)
    held = 2 * parameters + state + (P if scheme == "zero2" else 0)  # what is gathered counts for ZeRO-2
    assert formula.state_bytes == held
    assert [assumption.holds for assumption in summary.memory_assumptions] == [True, True, True]
    assert formula.activation_formula_bytes is None
    assert not any(caveat.startswith("activation formula") for caveat in summary.cannot_tell)  # nothing is amiss


def test_state_of_which_a_part_is_unknown_is_unknown() -> None:
    ddp = [("all_reduce", "ddp", "ddp bucket 0, 4 MiB")]
    formula = holding(ddp, parameters=4 * P, gradients=UNKNOWN_GRADIENTS, state=8 * P).ranks[0].memory_formula
    assert formula is not None
    assert formula.state_bytes is None  # 12P of parameters and optimizer state would be no figure of the model state
    assert formula.state_formula_bytes == 16 * P


def test_tensor_parallel_layers_of_unknown_sizes_are_reported() -> None:
    (caveat,) = [
        text for text in holding(parameters=P, state=P, axis="tp").cannot_tell if text.startswith("activation")
    ]
    assert "only the layers that torch.distributed.tensor.parallel spreads" in caveat


def test_other_optimizers_and_frozen_parameters_break_an_assumption() -> None:
    ddp = [("all_reduce", "ddp", "ddp bucket 0, 4 MiB")]
    momentum = holding(ddp, parameters=4 * P, state=4 * P)
    assert [assumption.holds for assumption in momentum.memory_assumptions] == [True, False, True]
    frozen = holding(ddp, parameters=4 * P, gradients=P, state=8 * P)
    assert [assumption.holds for assumption in frozen.memory_assumptions] == [True, True, False]
    # 2P bytes of 16-bit values, 12P of 32-bit copy and moments
    mixed = holding(ddp, parameters=2 * P, state=12 * P)
    assert mixed.ranks[0].memory_formula is not None
    assert mixed.ranks[0].memory_formula.state_formula_bytes == 16 * P
    assert "copy" in mixed.memory_assumptions[1].text
    assert mixed.memory_assumptions[1].holds
    unknown = holding([("all_reduce", "", "")], parameters=4 * P, state=8 * P)
    assert unknown.memory_assumptions[0].holds is None  # some other framework may spread it


def formula_caveats(summary: Summary) -> list[str]:
    return [caveat for caveat in summary.cannot_tell if caveat.startswith("memory formula")]


def test_less_than_the_whole_state_where_nobody_says_who_shards_is_a_caveat() -> None:
    """A fork of a framework under a name of its own is not recognised: half of Adam's moments are here."""
    by_nobody, ddp = [("all_reduce", "", "")], [("all_reduce", "ddp", "ddp bucket 0, 4 MiB")]
    (caveat,) = formula_caveats(holding(by_nobody, parameters=4 * P, state=4 * P))
    assert "nothing says whether ranks 0-3 shard" in caveat
    assert not formula_caveats(holding(by_nobody, parameters=4 * P, state=8 * P))
    assert not formula_caveats(holding(ddp, parameters=4 * P, state=4 * P))  # momentum of SGD: DDP replicates


def test_models_that_are_sharded_differently_have_no_formula() -> None:
    both = [("all_reduce", "ddp", "ddp bucket 0, 4 MiB"), ("all_gather", "fsdp", "fsdp all-gather of root")]
    summary = holding(both, parameters=4 * P, state=8 * P)
    (caveat,) = formula_caveats(summary)
    assert "sharded differently" in caveat
    assert (summary.ranks[0].memory_formula, summary.memory_assumptions) == (None, ())


def test_activations_of_tensor_parallel_layers() -> None:
    # sbh = 1000 values of 16 bits, 2 ranks, 2 layers: 1000 * (10 + 24/2) * 2 = 44,000
    rows = [("all_reduce", "tp", f"tp output of layers.{i}.mlp.down") for i in range(2)]
    summary = holding(rows, parameters=4 * P, state=8 * P, world_size=2, nbytes=2000, dtype="bfloat16")
    formula = summary.ranks[0].memory_formula
    assert formula is not None
    assert (formula.activation_bytes, formula.activation_formula_bytes) == (7 * P, 44_000)
    share = ModelShare(layers=2, crossing_values=1000, tensor_ranks=2, is_sequence_parallel=True)
    assert activation_bytes(share) == 34_000
    wide = ModelShare(layers=2, crossing_values=1000, value_bytes=4, tensor_ranks=2, in_flight=3, recomputes=True)
    assert activation_bytes(wide) == 2 * 1000 * 2 * 2 * 3


def test_headroom_is_of_the_scarcest_memory_first() -> None:
    nodes = (
        NodeMemory(host="a", device="host", capacity_bytes=100 * P, most_used_bytes=40 * P),
        NodeMemory(host="a", device="gpu 0", capacity_bytes=80 * P, most_used_bytes=79 * P),
    )
    summary = summarise(MemoryRun([RankBuilder(0, world_size=1)], memory=nodes))
    assert [(one.device, one.headroom_bytes) for one in summary.headroom] == [("gpu 0", P), ("host", 60 * P)]
    assert "977 KiB of 76.3 MiB left on gpu 0 of a" in summary_text(summary)
    assert summary_json(summary)["headroom"][0]["headroom_bytes"] == P


def sample_at(t_ns: int, used: float, **host_values: float) -> Sample:
    host = [{"memory_used_bytes": used, **host_values}.get(one.name) for one in HOST]
    gpu = [2 * used if one.name == "memory_used_bytes" else None for one in GPU]
    return Sample(t_ns=t_ns, host=host, cores=[0.0], gpus={1: gpu}, processes={})


@pytest.mark.parametrize("count", [20, 20 * MOST_LINES])
def test_the_most_that_a_node_used_is_read_from_its_samples(tmp_path: Path, count: int) -> None:
    node = tmp_path / "node-a"
    node.mkdir()
    file = SampleFile(node, {"memory_bytes": 10 * P, "gpus": [{"index": 1, "memory_bytes": 30 * P}]}, max_bytes=1 << 30)
    file.append(sample_at(0, 0))
    line = node / "samples.jsonl"
    description, pattern = line.read_bytes().splitlines(keepends=True)
    grown = [pattern.replace(b"[null,null,null,null,null,0", b"[null,null,null,null,null,%d" % n) for n in range(count)]
    line.write_bytes(description + b"".join(grown) + b"not json\n" + pattern[:30])
    host, gpu = read_node_memory(tmp_path)
    assert (host.host, host.device, host.capacity_bytes) == ("a", "host", 10 * P)
    assert 0.99 * count - 2 <= host.most_used_bytes < count
    assert (gpu.device, gpu.capacity_bytes, gpu.most_used_bytes) == ("gpu 1", 30 * P, 0)


@pytest.mark.parametrize(("limit", "devices"), [(4 * P, ["container", "host"]), (10 * P, ["host"]), (None, ["host"])])
def test_a_container_that_may_use_less_than_the_host_has_headroom_of_its_own(
    tmp_path: Path, limit: int | None, devices: list[str]
) -> None:
    node = tmp_path / "node-a"
    node.mkdir()
    file = SampleFile(node, {"memory_bytes": 10 * P, "cgroup_limit_bytes": limit, "gpus": []})
    # Of 3.5 P that are charged at most 1 P is cache: 3 P of 4 P are in use, and 5 P of the 10 P of the host.
    for charged, cache in ((3.5 * P, P), (3.2 * P, 0.2 * P)):
        file.append(sample_at(0, 5 * P, cgroup_memory_bytes=charged, cgroup_reclaimable_bytes=cache))
    summary = summarise(MemoryRun([RankBuilder(0, world_size=1)], memory=read_node_memory(tmp_path)))
    assert [one.device for one in summary.headroom] == devices
    assert summary.headroom[-1].headroom_bytes == 5 * P
    if limit == 4 * P:
        assert summary.headroom[0].headroom_bytes == P
        assert "left on a, in its container" in summary_text(summary)


def test_experts_sharded_over_fewer_ranks_than_the_rest_have_no_formula() -> None:
    declared = [Sharding(scheme="zero2", shards=shards, by="deepspeed") for shards in (4, 2)]
    tables = RankBuilder(0, world_size=4).tables()
    experts = find_share(
        dataclasses.replace(tables, shardings=tuple(declared)), list_labelled(tables, tables.operations), None
    )
    assert experts.is_of_several
    # OSS and ShardedDataParallel of FairScale shard one model.
    both = [Sharding(scheme=scheme, shards=4, by="fairscale") for scheme in ("zero1", "zero2")]
    model = find_share(
        dataclasses.replace(tables, shardings=tuple(both)), list_labelled(tables, tables.operations), None
    )
    assert (model.is_of_several, model.scheme, model.shards) == (False, "zero2", 4)


def test_embedding_tables_on_ranks_of_their_own_have_no_formula() -> None:
    tables = RankBuilder(0, world_size=4).tables()
    declared = dataclasses.replace(tables, shardings=(Sharding(scheme="tables", shards=4, by="torchrec"),))
    assert find_share(declared, list_labelled(tables, tables.operations), None).is_of_several


def test_gradients_of_zero2_are_a_shard_beside_whole_parameters() -> None:
    # On 2 ranks, 16-bit parameters of P values: 2P bytes whole. Gradients as wide are P bytes a rank; those that
    # DeepSpeed keeps in 32 bits, 2P, agree with the parameters by chance.
    deepspeed = Sharding(scheme="zero2", shards=2, by="deepspeed")
    for gradients, holds in ((P, True), (2 * P, False)):
        ranks = []
        for number in range(2):
            rank = RankBuilder(number, world_size=2)
            rank.shardings = (deepspeed,)
            values = {"peak_rss": 100 * P, "parameter": 2 * P, "gradient": gradients, "optimizer_state": 6 * P}
            for name, value in values.items():
                rank.sample(f"{name}_bytes", 10_000, value)
            ranks.append(rank)
        assumed = {assumption.text: assumption.holds for assumption in summarise(MemoryRun(ranks)).memory_assumptions}
        assert assumed["gradients of all parameters, as wide"] is holds


def test_text_names_the_assumption_that_does_not_hold() -> None:
    ddp = [("all_reduce", "ddp", "ddp bucket 0, 4 MiB")]
    momentum = " ".join(summary_text(holding(ddp, parameters=4 * P, state=4 * P)).split())
    assert "formulas assume what does not hold here: Adam: two moments of each parameter, as wide" in momentum
    assert "assume" not in summary_text(holding(ddp, parameters=4 * P, state=8 * P))
