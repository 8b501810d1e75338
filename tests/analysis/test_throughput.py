"""Tokens and samples a second of the job: which ranks add up, which steps count, what cannot be told."""

from collections.abc import Sequence

import pytest

from dtprof.analysis.results import Summary, Throughput
from dtprof.analysis.run_summary import summarise
from dtprof.report.documents.summary_json import summary_json
from dtprof.report.text.summary_text import summary_text
from tests.builders import MemoryRun, RankBuilder

MS = 1_000_000
STEP = 100 * MS


def job(
    fed: Sequence[Sequence[tuple[int, int]]],
    groups: Sequence[tuple[str, Sequence[int]]] = (),
    features: tuple[str, ...] = (),
    *,
    missing: Sequence[int] = (),
    damaged: Sequence[int] = (),
) -> Summary:
    """Return the summary of ranks that are each fed (tokens, samples) in each step of 100 ms.

    Parameters:
        missing: ranks that left no log. damaged: those of whose log only the groups can be read.
    """
    ranks = []
    for rank, own in enumerate(fed):
        builder = RankBuilder(rank, world_size=len(fed), features=features)
        for description, members in groups:
            if rank in members:
                builder.group(f"{description}{members[0]}", members, description)
        before = (0, 0)
        if rank in damaged:
            builder.problems = ("events.00000 holds 70 damaged records, left out",)
        for step, values in enumerate(own if rank not in damaged else ()):
            begin = step * STEP
            builder.span("backward", begin + 10 * MS, begin + 60 * MS)
            for name, value, held in zip(("step_tokens", "step_samples"), values, before, strict=True):
                if value != held:
                    builder.sample(name, begin + 70 * MS, value)
            before = values
            builder.span("optimizer", begin + 80 * MS, begin + 90 * MS)
        ranks.append(builder)
    return summarise(MemoryRun([builder for builder in ranks if builder.rank not in missing]))


def throughput(summary: Summary) -> Throughput:
    assert summary.throughput is not None
    return summary.throughput


def caveats(summary: Summary) -> list[str]:
    return [text for text in summary.cannot_tell if "per_s:" in text and not text.startswith("busbw")]


SAME = [(640, 10)] * 6


@pytest.mark.parametrize(
    ("groups", "tokens", "samples"),
    [
        ([], 4 * 6400, 4 * 100),
        ([("mesh_dp_replicate", (0, 1)), ("mesh_dp_replicate", (2, 3))], 4 * 6400, 4 * 100),
        ([("mesh_tp", (0, 1)), ("mesh_tp", (2, 3))], 2 * 6400, 2 * 100),
        ([("mesh_tp", (0, 1)), ("mesh_tp", (2, 3)), ("mesh_pp", (0, 2)), ("mesh_pp", (1, 3))], 6400, 100),
        ([("mesh_cp", (0, 1)), ("mesh_cp", (2, 3))], 4 * 6400, 2 * 100),
    ],
    ids=["no groups", "dp", "tp", "tp and pp", "cp"],
)
def test_ranks_of_one_replica_count_once_and_all_others_add_up(
    groups: list[tuple[str, Sequence[int]]], tokens: int, samples: int
) -> None:
    # 640 tokens in 10 samples on each of four ranks in each step of 0.1 s.
    summary = job([SAME] * 4, groups)
    found = throughput(summary)
    assert (found.tokens_per_s, found.samples_per_s) == (tokens, samples)
    assert (found.tokens_per_step, found.samples_per_step) == (tokens / 10, samples / 10)
    assert caveats(summary) == []


TP_PP = [("mesh_tp", (0, 1)), ("mesh_tp", (2, 3)), ("mesh_pp", (0, 2)), ("mesh_pp", (1, 3))]


@pytest.mark.parametrize("lost", ["missing", "damaged"])
@pytest.mark.parametrize("groups", [[], [("mesh_dp", (0, 1, 2, 3))], [("mesh_tp", (0, 1)), ("mesh_tp", (2, 3))]])
def test_without_a_rank_that_has_data_of_its_own_rates_and_stragglers_are_not_known(
    lost: str, groups: list[tuple[str, Sequence[int]]]
) -> None:
    gone = [3] if len(groups) < 2 else [2, 3]  # a whole replica
    summary = job([SAME] * 4, groups, missing=gone) if lost == "missing" else job([SAME] * 4, groups, damaged=gone)
    assert summary.throughput is None
    assert summary.stragglers is None
    named = "rank 3" if len(gone) == 1 else "ranks 2, 3"
    reason = f"the log of {named} is missing or damaged, and no other rank is known to have been given the same"
    assert caveats(summary) == [f"tokens_per_s: {reason}", f"samples_per_s: {reason}"]
    assert f"stragglers: the log of {named} is missing or damaged, so that not all waits are known" in map(
        str, summary.cannot_tell
    )
    document = summary_json(summary)
    for key in ("tokens_per_s", "samples_per_s", "stragglers"):
        assert document[key] is None
    assert document["steps"]["tokens"] is document["steps"]["mean_tokens_per_s"] is None
    text = " ".join(summary_text(summary).split())
    assert f"throughput not known: {reason}" in text


@pytest.mark.parametrize("lost", ["missing", "damaged"])
@pytest.mark.parametrize(("groups", "rate"), [(TP_PP[:2], 2 * 6400), (TP_PP, 6400)], ids=["tp", "tp and pp"])
def test_without_a_rank_whose_partner_was_given_the_same_the_rate_is_known(
    lost: str, groups: list[tuple[str, Sequence[int]]], rate: int
) -> None:
    summary = job([SAME] * 4, groups, missing=[3]) if lost == "missing" else job([SAME] * 4, groups, damaged=[3])
    assert throughput(summary).tokens_per_s == rate
    assert caveats(summary) == []
    assert summary.stragglers is None


def test_without_the_only_stage_that_is_given_ids_tokens_are_not_known() -> None:
    # Stages 0 are ranks 0 and 2; the stage behind is given activations, whose samples are known.
    later = [(0, 10)] * 6
    summary = job([SAME, later, SAME, later], [("mesh_pp", (0, 1)), ("mesh_pp", (2, 3))], missing=[2])
    assert throughput(summary).tokens_per_s is None
    assert throughput(summary).samples_per_s == 200
    assert [text.partition(":")[0] for text in caveats(summary)] == ["tokens_per_s"]


def test_a_stage_that_sees_no_ids_counts_with_the_one_that_does() -> None:
    summary = job([SAME, [(0, 10)] * 6], [("mesh_pp", (0, 1))])
    assert (throughput(summary).tokens_per_s, throughput(summary).samples_per_s) == (6400, 100)
    assert caveats(summary) == []


def test_the_rate_is_the_median_of_the_used_steps() -> None:
    # Steps 2 to 6 are used: 100, 200, 300, 300, 900 tokens in 0.1 s each.
    summary = job([[(tokens, 1) for tokens in (500, 100, 200, 300, 300, 900)]])
    found = throughput(summary)
    assert summary.steps.used == (2, 6)
    assert found.tokens_per_s_of_steps == pytest.approx((1000, 2000, 3000, 3000, 9000))
    assert (found.first_step, found.tokens_per_s, found.tokens_per_step) == (2, 3000, 300)


def test_rare_long_steps_set_the_mean_rate_apart_from_the_median() -> None:
    # 640 tokens a step. Steps 2 to 6 take 0.1 s, but for step 4, whose loader takes 0.6 s: 3,200 tokens in 1.0 s.
    rank = RankBuilder(0, world_size=1)
    end = 0
    for step in range(6):
        begin, end = end, end + (STEP if step != 3 else 6 * STEP)
        rank.span("backward", begin + 10 * MS, begin + 60 * MS)
        if not step:
            rank.sample("step_tokens", begin + 70 * MS, 640)
        rank.span("optimizer", end - 10 * MS, end)
    summary = summarise(MemoryRun([rank]))
    found = throughput(summary)
    assert (found.tokens_per_s, found.mean_tokens_per_s) == pytest.approx((6400, 3200))
    assert found.mean_samples_per_s is None
    text = " ".join(summary_text(summary).split())
    assert "6,400 tokens/s, 640 a step; over the time of all measured steps 3,200 tokens/s" in text
    assert "all measured steps" not in summary_text(job([SAME] * 4))


def test_images_have_samples_a_second_and_tokens_are_not_known() -> None:
    summary = job([[(0, 32)] * 6] * 2)
    assert throughput(summary).tokens_per_s is None
    assert throughput(summary).samples_per_s == 640
    assert caveats(summary) == [
        "tokens_per_s: no model was given token ids (integers, batch by sequence); dtprof.step(tokens=N) says how many"
    ]
    assert summary_json(summary)["samples_per_s"] == 640
    assert "640 samples/s, 64 a step" in summary_text(summary)


def test_samples_are_not_known_where_layers_may_take_the_sequence_first() -> None:
    summary = job([[(640, 0)] * 6] * 2, features=("layers:sequence_first",))
    assert (throughput(summary).tokens_per_s, throughput(summary).samples_per_s) == (12800, None)
    assert caveats(summary) == [
        "samples_per_s: the model has layers of torch.nn with batch_first=False, and nothing else says which dimension "
        "of its token ids is the batch"
    ]
    packed = job([[(640, 0)] * 6] * 2, features=("inputs:packed",))
    assert any("one row of token ids with position_ids and no mask" in text for text in caveats(packed))


def test_a_job_that_recorded_nothing_of_it_has_null_and_a_reason() -> None:
    summary = job([[(0, 0)] * 6] * 2)
    assert summary.throughput is None
    document = summary_json(summary)
    assert (document["tokens_per_s"], document["samples_per_s"]) == (None, None)
    assert (document["steps"]["tokens"], document["steps"]["samples"]) == (None, None)
    assert [text.split(":")[0] for text in caveats(summary)] == ["tokens_per_s", "samples_per_s"]
    assert "samples/s" not in summary_text(summary)


def test_a_rank_that_is_given_nothing_is_named() -> None:
    summary = job([SAME, [(0, 0)] * 6])
    assert throughput(summary).tokens_per_s == 6400
    assert caveats(summary) == ["tokens_per_s: the models of rank 1 were given none; they count as 0"]


def test_groups_that_nothing_names_are_reported() -> None:
    (caveat,) = caveats(job([SAME] * 4, [("mine", (0, 1)), ("mine", (2, 3))]))
    assert "nothing says what group 'mine0' and 1 more is for" in caveat


def test_what_held_before_the_first_sample_that_is_left_is_taken_to_be_the_same() -> None:
    found = throughput(job([[(0, 0)] * 4 + [(640, 10)] * 4]))
    assert found.tokens_per_s_of_steps == pytest.approx([6400] * 7)


def test_steps_before_the_first_ids_have_none_where_their_samples_are_known() -> None:
    found = throughput(job([[(0, 10)] * 4 + [(640, 10)] * 4]))
    assert found.tokens_per_s_of_steps == pytest.approx([0] * 3 + [6400] * 4)
    assert found.samples_per_s_of_steps == pytest.approx([100] * 7)


def test_optimizers_that_step_in_turn_have_the_mean_of_their_steps() -> None:
    # An actor's step is given 640 tokens, the critic's step none: 320 a step, 3,200 a second.
    summary = job([[(640, 10), (0, 0)] * 4])
    found = throughput(summary)
    assert (found.tokens_per_step, found.samples_per_step) == (320, 5)
    assert found.tokens_per_s == pytest.approx(3200)
    assert caveats(summary)[0].startswith("tokens_per_s: 3 of 7 steps were given none")


def test_text_and_json_have_both_rates() -> None:
    summary = job([SAME] * 4)
    assert "throughput  25,600 tokens/s, 2,560 a step; 400 samples/s" in summary_text(summary)
    document = summary_json(summary)
    assert (document["tokens_per_s"], document["samples_per_s"]) == (25600, 400)
    assert (document["steps"]["tokens"], document["steps"]["samples"]) == (2560, 40)


def exchange(kind: str, description: str = "") -> Summary:
    """Return the summary of 2 ranks that are fed the same, and exchange something in each step."""
    ranks = [RankBuilder(rank, world_size=2) for rank in range(2)]
    for rank, builder in enumerate(ranks):
        group = builder.group("1", (0, 1), description) if description else 0
        for step in range(6):
            begin = step * STEP
            builder.span("forward", begin + 10 * MS, begin + 30 * MS)
            if kind == "messages":
                builder.op(
                    "recv" if rank else "send", begin + 31 * MS, begin + 32 * MS, group=group, peer=1 - rank, nbytes=4
                )
            elif kind != "nothing":
                at = {"gradients": 62}.get(kind, 12)
                name = "all_to_all" if kind == "own tokens" else "all_reduce"
                builder.op(name, begin + at * MS, begin + (at + 1) * MS, group=group, nbytes=4)
            builder.span("backward", begin + 40 * MS, begin + 60 * MS)
            if not step:
                builder.sample("step_tokens", begin + 70 * MS, 640)
                builder.sample("step_samples", begin + 70 * MS, 10)
            builder.span("optimizer", begin + 80 * MS, begin + 90 * MS)
    return summarise(MemoryRun(ranks))


def test_ranks_that_exchange_all_to_all_have_tokens_of_their_own() -> None:
    # Experts on the ranks of a group that nothing names, or layers parallel along the sequence: their samples differ.
    summary = exchange("own tokens")
    assert (throughput(summary).tokens_per_step, throughput(summary).samples_per_step) == (1280, None)
    assert any(
        text.startswith("samples_per_s: ") and "all_to_all in the forward pass: each may be given a part" in text
        for text in summary.cannot_tell
    )
    assert throughput(exchange("own tokens", "mesh_ep")).samples_per_step == 20


@pytest.mark.parametrize(
    ("kind", "description", "tokens"),
    [
        ("gradients", "", 1280),
        ("activations", "mesh_tp", 640),
        ("activations", "mesh_tensor_parallel", 640),
        ("messages", "mesh_pp", 640),
        ("activations", "mesh_cp", 1280),
    ],
)
def test_tokens_of_ranks_that_share_them_count_once(kind: str, description: str, tokens: int) -> None:
    assert throughput(exchange(kind, description)).tokens_per_step == tokens


@pytest.mark.parametrize(
    ("kind", "description", "reason"),
    [
        ("activations", "", "its ranks all_reduce in the forward pass"),
        ("activations", "mesh_world", "its ranks all_reduce in the forward pass"),
        ("messages", "", "ranks 0, 1 send each other messages"),
    ],
)
def test_tokens_are_not_known_where_ranks_may_share_them(kind: str, description: str, reason: str) -> None:
    summary = exchange(kind, description)
    assert summary.throughput is None
    assert any(text.startswith("tokens_per_s: ") and reason in text for text in summary.cannot_tell)


def test_a_forward_pass_that_is_given_no_tensor_is_not_said_to_be_missing() -> None:
    def reasons(*phases: str) -> list[str]:
        builder = RankBuilder(0, world_size=1)
        for step in range(6):
            begin = step * STEP
            for place, phase in enumerate((*phases, "backward", "optimizer")):
                builder.span(phase, begin + place * 20 * MS, begin + place * 20 * MS + 10 * MS)
            builder.sample("rss_bytes", begin + 90 * MS, 1 << 20)
        return caveats(summarise(MemoryRun([builder])))

    assert all("no model was given" in text for text in reasons("forward"))
    assert all("no training forward pass" in text for text in reasons())
