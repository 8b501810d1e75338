import numpy as np
import pytest
import torch

from reference_trainer.batches import Batches
from reference_trainer.errors import UsageError
from reference_trainer.interfaces import Batch
from reference_trainer.options import Options, parse_options
from reference_trainer.placement import Placement
from reference_trainer.token_file import Facts, TokenFile
from reference_trainer.tokenizer import ByteTokenizer, Vocabulary
from reference_trainer.windows import Windows, refuse_short_corpus


def build_tokens(num_tokens: int) -> TokenFile:
    """Return tokens that say where they stand: number n is n % 251."""
    return TokenFile(
        tokens=(np.arange(num_tokens) % 251).astype(np.uint8),
        marks=ByteTokenizer().mark_tokens(),
        vocabulary=Vocabulary(num_text_tokens=256),
        facts=Facts(
            source="made up",
            num_files=1,
            num_files_skipped=0,
            cut=False,
            num_bytes=num_tokens,
            tokenizer="bytes",
            num_text_tokens=256,
            num_tokens=num_tokens,
            entropy_nats=5.5,
        ),
    )


# With 9 inputs a window: (1,000 - 1) // 9 = 111 windows, of which number 63 is held out.
TOKENS = build_tokens(1_000)


def build_options(world_size: int, *arguments: str) -> Options:
    sizes = ("--batch-size", "4", "--sequence-length", "9")
    return parse_options([*sizes, *arguments], Placement(world_size=world_size))


def join(per_rank: list[Batch]) -> dict[str, torch.Tensor]:
    return {name: torch.cat([batch[name] for batch in per_rank]) for name in per_rank[0]}  # type: ignore[literal-required]


def draw_batches(num_ranks: int, num_batches: int, *arguments: str, position: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return global batches, put together from the rows of all data-parallel ranks."""
    options = build_options(num_ranks, *arguments)
    sources = [Batches(TOKENS, options, data_rank=rank) for rank in range(num_ranks)]
    for source in sources:
        source.load_state_dict({"num_samples": position})
    return [join([next(source) for source in sources]) for _ in range(num_batches)]


def test_windows_are_shifted_by_their_length_and_share_one_token() -> None:
    windows = Windows(TOKENS, sequence_length=9, seed=0)
    assert (windows.num_trained, windows.num_held_out) == (110, 1)
    assert windows.read_held_out(0).tolist() == [n % 251 for n in range(63 * 9, 64 * 9 + 1)]
    firsts = sorted(int(windows.read(sample)[0]) for sample in range(110))
    assert firsts == sorted(n * 9 % 251 for n in range(111) if n != 63)


def test_decoder_is_asked_for_the_next_token() -> None:
    (batch,) = draw_batches(1, 1)
    assert batch["inputs"].shape == batch["targets"].shape == (4, 9)
    assert torch.equal(batch["targets"], (batch["inputs"] + 1) % 251)


def test_bart_is_asked_for_the_window_behind_a_begin_token() -> None:
    (batch,) = draw_batches(1, 1, "--model", "bart")
    assert set(batch) == {"inputs", "targets", "encoder_inputs", "encoder_mask"}
    assert (batch["inputs"][:, 0] == 257).all()
    assert torch.equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    assert batch["encoder_mask"].any(dim=1).all()
    assert (batch["encoder_inputs"][~batch["encoder_mask"]] == 258).all()
    # 3 of 9 tokens are gone, and masks are there instead.
    for row, mask, target in zip(batch["encoder_inputs"], batch["encoder_mask"], batch["targets"], strict=True):
        kept = row[mask & (row != 256)]
        assert len(kept) == 6
        assert set(kept.tolist()) <= set(target.tolist())
    assert (batch["encoder_inputs"] == 256).any()


def test_each_window_is_drawn_once_an_epoch_and_later_epochs_have_another_order() -> None:
    windows = Windows(TOKENS, sequence_length=9, seed=0)
    epochs = [[windows.read(epoch * 110 + place).tobytes() for place in range(110)] for epoch in range(2)]
    assert sorted(epochs[0]) == sorted(epochs[1])
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("model", ["gpt", "bart"])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_global_batches_do_not_depend_on_ranks_or_on_where_a_run_was_cut(model: str, num_ranks: int) -> None:
    expected = draw_batches(1, 40, "--model", model)  # 160 samples: into the second epoch
    batches = draw_batches(num_ranks, 25, "--model", model, position=15 * 4)
    for batch, other in zip(batches, expected[15:], strict=True):
        assert all(torch.equal(batch[name], other[name]) for name in other)


def test_position_counts_what_was_yielded_though_workers_read_ahead() -> None:
    options = build_options(1, "--data-workers", "1")
    source = Batches(TOKENS, options, data_rank=0)
    expected = draw_batches(1, 4)
    yielded = [next(source) for _ in range(3)]
    assert source.state_dict() == {"num_samples": 12}
    assert all(torch.equal(batch["targets"], other["targets"]) for batch, other in zip(yielded, expected, strict=False))
    again = Batches(TOKENS, options, data_rank=0)
    again.load_state_dict(source.state_dict())
    assert torch.equal(next(again)["targets"], expected[3]["targets"])
    source.loader = again.loader = None  # ends the workers


def test_another_seed_gives_another_order_and_another_damage() -> None:
    first, other = (draw_batches(1, 1, "--model", "bart", "--seed", seed)[0] for seed in ("0", "1"))
    assert not torch.equal(first["targets"], other["targets"])
    assert not torch.equal(first["encoder_inputs"], other["encoder_inputs"])


def test_held_out_text_is_the_same_at_every_evaluation_and_on_any_number_of_ranks() -> None:
    tokens = build_tokens(20_000)  # 2,222 windows: 34 held out, 8 batches of 4
    options = [build_options(num_ranks, "--model", "bart") for num_ranks in (1, 2)]
    alone = Batches(tokens, options[0], data_rank=0)
    pair = [Batches(tokens, options[1], data_rank=rank) for rank in range(2)]
    expected = list(alone.read_held_out())
    next(alone)
    assert len(expected) == 8
    looks = [join(list(rows)) for rows in zip(*(source.read_held_out() for source in pair), strict=True)]
    for again, look, other in zip(alone.read_held_out(), looks, expected, strict=True):
        assert torch.equal(again["encoder_inputs"], other["encoder_inputs"])
        assert torch.equal(look["encoder_inputs"], other["encoder_inputs"])


@pytest.mark.parametrize(
    ("num_tokens", "arguments", "message"),
    [
        (36, (), "the default corpus has 36 tokens: 3 windows of --sequence-length 9 to train on; one step takes"),
        (1_000, ("--evaluate-every", "1"), "110 windows .* and 1 for evaluation; one evaluation takes --batch-size 4"),
        (36, ("--corpus", "x"), "--corpus x has 36 tokens"),
    ],
)
def test_short_corpus_is_refused(num_tokens: int, arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        refuse_short_corpus(build_tokens(num_tokens), build_options(1, *arguments))
    refuse_short_corpus(build_tokens(37), build_options(1))
