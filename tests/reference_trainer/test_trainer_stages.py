import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reference_trainer.layout import Layout
from reference_trainer.options import parse_options
from reference_trainer.parallelism.stages import (
    balance,
    count_carried,
    divide_layers,
    find_stages_of_rank,
    measure_layers,
)
from reference_trainer.placement import Placement
from reference_trainer.presets import PRESETS, BartShape

CPU = torch.device("cpu")


def test_stages_go_round_in_circles_or_in_a_v() -> None:
    circle = Layout(pp=3, schedule="interleaved1f1b", stages_per_rank=2)
    assert [find_stages_of_rank(circle, rank) for rank in range(3)] == [[0, 3], [1, 4], [2, 5]]
    v = Layout(pp=3, schedule="zbv", stages_per_rank=2)
    assert [find_stages_of_rank(v, rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]


def test_layers_are_divided_evenly_unless_reported() -> None:
    # 8 layers on 3 ranks: the first two get those that are left over.
    placement = Placement(world_size=3)
    even = ["--preset", "deep", "--pp", "3", "--batch-size", "18"]
    assert divide_layers(parse_options(even, placement), CPU) == [3, 3, 2]
    given = ["--preset", "deep", "--pp", "3", "--batch-size", "18", "--pp-split", "2,2,4"]
    assert divide_layers(parse_options(given, placement), CPU) == [2, 2, 4]


def test_a_dear_last_layer_gets_a_stage_with_fewer_others() -> None:
    # 1 1 1 1 1 3 on two stages: 4 and 4 is the best.
    assert balance([1, 1, 1, 1, 1, 3], 2) == [4, 2]


@given(st.lists(st.integers(1, 9), min_size=3, max_size=8), st.integers(1, 3))
def test_no_other_division_has_a_cheaper_dearest_stage(costs: list[int], num_stages: int) -> None:
    split = balance(costs, num_stages)
    assert sum(split) == len(costs)
    assert len(split) == num_stages
    assert min(split) >= 1

    def dearest(cuts: tuple[int, ...]) -> float:
        return max(sum(costs[a:b]) for a, b in itertools.pairwise((0, *cuts, len(costs))))

    best = min(map(dearest, itertools.combinations(range(1, len(costs)), num_stages - 1)))
    assert dearest(tuple(itertools.accumulate(split[:-1]))) == best


@pytest.mark.parametrize("model", ["gpt", "bart"])
def test_every_layer_of_both_models_can_be_timed(model: str) -> None:
    options = parse_options(["--preset", "deep", "--model", model], Placement())
    costs = measure_layers(options, CPU)
    assert costs.shape == (8,)
    assert costs.min() > 0


def test_barts_decoder_hands_over_what_the_encoder_made() -> None:
    shape = PRESETS["deep"].shapes["bart"]
    assert isinstance(shape, BartShape)
    # 4 encoder layers: before layer 4, the first of the decoder, there is only what the encoder has made.
    assert [count_carried(shape, layer) for layer in (1, 4, 5, 7)] == [1, 1, 2, 2]
    assert count_carried(PRESETS["deep"].shapes["gpt"], 9) == 1
