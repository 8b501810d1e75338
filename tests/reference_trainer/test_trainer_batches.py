from itertools import islice

import pytest
import torch

from reference_trainer.batches import Windows, build_loader
from reference_trainer.options import Options, parse_options
from reference_trainer.placement import Placement

TEXT = bytes(range(1, 101))  # 100 bytes: with 9 inputs a window, (100 - 1) // 9 = 11 windows


def build_options(world_size: int, *arguments: str) -> Options:
    sizes = ("--batch-size", "4", "--sequence-length", "9")
    return parse_options([*sizes, *arguments], Placement(world_size=world_size))


def draw_batches(world_size: int, num_batches: int, *arguments: str) -> list[torch.Tensor]:
    """Return the first global batches, put together from the micro-batches of all ranks."""
    options = build_options(world_size, *arguments)
    per_rank = [
        build_loader(TEXT, options=options, placement=Placement(rank=rank, world_size=world_size), pin_memory=False)
        for rank in range(world_size)
    ]
    count = num_batches * options.accumulate
    slices = [torch.stack(list(islice(iter(loader), count))).view(num_batches, -1, 10) for loader in per_rank]
    return list(torch.cat(slices, dim=1))


def test_windows_are_shifted_by_their_length_and_share_one_token() -> None:
    windows = Windows(TEXT, sequence_length=9)
    assert len(windows) == 11
    assert windows[0].tolist() == list(range(1, 11))
    assert windows[1].tolist() == list(range(10, 20))
    assert windows[10].tolist() == list(range(91, 101))


def test_each_window_is_drawn_at_most_once_an_epoch() -> None:
    # 11 windows hold 2 global batches of 4; 3 windows are left out of this epoch.
    first_tokens = [row[0].item() for batch in draw_batches(2, 2) for row in batch]
    assert len(set(first_tokens)) == 8
    assert set(first_tokens) <= {1 + 9 * index for index in range(11)}


def test_later_epochs_have_another_order() -> None:
    batches = draw_batches(1, 4)
    assert not torch.equal(torch.cat(batches[:2]), torch.cat(batches[2:]))


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 2), (1, 4), (2, 1), (2, 2), (4, 1)])
def test_global_batches_do_not_depend_on_ranks_and_micro_batches(world_size: int, accumulate: int) -> None:
    expected = draw_batches(1, 5)
    batches = draw_batches(world_size, 5, "--accumulate", str(accumulate))
    assert all(torch.equal(batch, other) for batch, other in zip(batches, expected, strict=True))


def test_another_seed_gives_another_order() -> None:
    assert not torch.equal(draw_batches(1, 1)[0], draw_batches(1, 1, "--seed", "1")[0])
