"""Which layers each pipeline stage gets, and which stages each rank."""

import time
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from reference_trainer.layout import BALANCED, Layout
from reference_trainer.models import build_model
from reference_trainer.options import Options
from reference_trainer.precision import weight_dtype
from reference_trainer.presets import BartShape, ModelShape

V_SHAPED = ("zbv", "dualpipev")
TIMED_RUNS = 3


def find_stages_of_rank(layout: Layout, rank: int) -> list[int]:
    """Return the stages of a pipeline rank: in a circle, or in a V, on which the last stage lies with the first."""
    if layout.schedule in V_SHAPED:
        return [rank, 2 * layout.pp - 1 - rank]
    return [rank + layout.pp * turn for turn in range(layout.stages_per_rank)]


def divide_layers(options: Options, device: torch.device) -> list[int]:
    """Return the number of layers of each stage: as given, of even number, or of even measured time."""
    layout, num_layers = options.layout, options.shape.num_layers
    if isinstance(layout.split, tuple):
        return list(layout.split)
    if layout.split == BALANCED:
        costs = measure_layers(options, device)
        # All ranks have to decide the same.
        if distributed.is_initialized():
            distributed.all_reduce(costs)
        return balance(costs.tolist(), layout.num_stages)
    quotient, rest = divmod(num_layers, layout.num_stages)
    return [quotient + (stage < rest) for stage in range(layout.num_stages)]


def measure_layers(options: Options, device: torch.device) -> Tensor:
    """Time forward and backward of each layer on this device, in seconds; the ends of the model go to their layers.

    Each layer is run on one microbatch, not divided any further, in the precision of the weights.
    """
    costs = [_time_layer(options, device, index) for index in range(options.shape.num_layers)]
    return torch.tensor(costs, dtype=torch.float64, device=device)


def count_carried(shape: ModelShape, layer: int) -> int:
    """Count the tensors that a pipeline hands over before this layer: in BART's decoder the encoder's result too."""
    return 2 if isinstance(shape, BartShape) and layer > shape.num_encoder_layers else 1


def balance(costs: Sequence[float], num_stages: int) -> list[int]:
    """Divide layers in a row into stages of one layer or more so that the dearest stage is as cheap as can be."""
    num_layers = len(costs)
    before = [0.0]
    for cost in costs:
        before.append(before[-1] + cost)
    # best[stages][end]: the cost of the dearest stage, and where the last one begins.
    best = [[(0.0, 0) if end == 0 else (float("inf"), 0) for end in range(num_layers + 1)]]
    for stage in range(1, num_stages + 1):
        row = [(float("inf"), 0)] * (num_layers + 1)
        for end in range(stage, num_layers + 1):
            row[end] = min(
                (max(best[stage - 1][start][0], before[end] - before[start]), start) for start in range(stage - 1, end)
            )
        best.append(row)
    split: list[int] = []
    end = num_layers
    for stage in range(num_stages, 0, -1):
        start = best[stage][end][1]
        split.insert(0, end - start)
        end = start
    return split


def _time_layer(options: Options, device: torch.device, index: int) -> float:
    """Return the shortest of a few runs: others only add to it."""
    shape, rows, length = options.shape, options.microbatch_size, options.sequence_length
    with torch.device(device):
        model = build_model(shape).to(weight_dtype(options))
        model.keep_layers(index, index + 1)
        num_carried = count_carried(shape, index) if index else 0
        carried = [torch.randn(rows, length, shape.dim, dtype=weight_dtype(options)) for _ in range(num_carried)]
        tokens = torch.zeros(rows, length, dtype=torch.long)
        batch = {"inputs": tokens}
        if isinstance(shape, BartShape):
            batch |= {"encoder_inputs": tokens, "encoder_mask": torch.ones_like(tokens, dtype=torch.bool)}
    durations_s = []
    for _ in range(TIMED_RUNS):
        started_s = time.perf_counter()
        outputs = model(*(x.requires_grad_() for x in carried), **batch)
        sum(x.sum() for x in (outputs if isinstance(outputs, tuple) else (outputs,))).backward()
        if device.type == "cuda":
            torch.cuda.synchronize()
        durations_s.append(time.perf_counter() - started_s)
    return min(durations_s)
