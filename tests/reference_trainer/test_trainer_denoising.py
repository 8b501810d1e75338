import numpy as np
import pytest

from reference_trainer.denoising import damage, draw_spans, fill_in, permute_sentences
from reference_trainer.tokenizer import ByteTokenizer, Vocabulary

MARKS = ByteTokenizer().mark_tokens()
MASK = Vocabulary(num_text_tokens=256).mask
LONG = np.arange(10_000, dtype=np.int64) % 200 + 1


def encode(text: bytes) -> np.ndarray:
    return np.frombuffer(text, dtype=np.uint8).astype(np.int64)


def test_spans_cover_what_was_asked_for_and_have_a_mean_of_three() -> None:
    spans = draw_spans(300_000, random=np.random.default_rng(0))
    assert spans.sum() == 300_000
    # Poisson(3): mean 3, share of zeros exp(-3) = 0.0498; 100,000 draws: standard error 0.0055 and 0.0007.
    assert spans.mean() == pytest.approx(3, abs=0.03)
    assert (spans == 0).mean() == pytest.approx(np.exp(-3), abs=0.004)
    assert list(draw_spans(0, random=np.random.default_rng(0))) == []


def test_thirty_percent_of_the_tokens_are_gone_and_the_rest_keeps_its_order() -> None:
    result = fill_in(LONG, mask=MASK, random=np.random.default_rng(1))
    kept = result[result != MASK]
    assert len(kept) == 7_000
    # 3,000 tokens in spans of 3 on average: 1,000 masks; standard deviation about 1000 ** 0.5 / 3 ** 0.5 = 18.
    assert len(result) - len(kept) == pytest.approx(1_000, abs=90)
    rest = iter(LONG)
    assert all(any(token == other for other in rest) for token in kept)


def test_spans_lie_anywhere() -> None:
    random = np.random.default_rng(2)
    positions = np.concatenate(
        [np.flatnonzero(fill_in(LONG[:100], mask=MASK, random=random) == MASK) for _ in range(500)]
    )
    # The damaged row has about 80 places; in the middle of them lies half of the masks.
    assert np.median(positions) == pytest.approx(40, abs=2)


def test_sentences_are_put_in_another_order_and_stay_whole() -> None:
    text = b"One. Two x.y is one! Three\nFour? Five"
    sentences = [b"One.", b" Two x.y is one!", b" Three\n", b"Four?", b" Five"]
    orders = set()
    for seed in range(20):
        result = (
            permute_sentences(encode(text), marks=MARKS, random=np.random.default_rng(seed)).astype(np.uint8).tobytes()
        )
        places = {result.find(sentence): sentence for sentence in sentences}
        assert b"".join(places[place] for place in sorted(places)) == result
        orders.add(result)
    assert len(orders) > 10


def test_damage_is_the_same_for_the_same_random_numbers() -> None:
    first, second, other = (damage(LONG, mask=MASK, marks=MARKS, random=np.random.default_rng(s)) for s in (3, 3, 4))
    assert np.array_equal(first, second)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("length", [1, 2, 3, 8])
def test_shortest_rows_keep_something(length: int) -> None:
    for seed in range(50):
        result = damage(LONG[:length], mask=MASK, marks=MARKS, random=np.random.default_rng(seed))
        assert len(result) >= 1
