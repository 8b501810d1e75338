import torch
from torch.nn import functional

from reference_trainer.model import Attention, Decoder, compute_rotation, initialise_weights, rotate
from reference_trainer.presets import PRESETS, DecoderShape

SHAPE = DecoderShape(num_layers=2, dim=16, num_heads=4, num_kv_heads=2, hidden_dim=24)


def build_decoder() -> Decoder:
    torch.manual_seed(0)
    model = Decoder(SHAPE)
    initialise_weights(model)
    return model.double()


def test_logits_have_one_row_a_position_and_one_column_a_token() -> None:
    assert build_decoder()(torch.zeros(3, 7, dtype=torch.long)).shape == (3, 7, 256)


def test_a_token_changes_no_logit_before_it() -> None:
    model = build_decoder()
    tokens = torch.arange(10).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 6] = 200
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=0)
    assert all((before[0, position] - after[0, position]).abs().max() > 1e-9 for position in range(6, 10))


def test_grouped_heads_equal_full_attention_with_repeated_key_value_heads() -> None:
    attention = Attention(SHAPE).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    rotation = compute_rotation(5, head_dim=4, like=x)

    def heads(projected: torch.Tensor, num_heads: int) -> torch.Tensor:
        return projected.view(2, 5, num_heads, 4).transpose(1, 2)

    query = rotate(heads(attention.query(x), 4), rotation)
    key = rotate(heads(attention.key(x), 2), rotation).repeat_interleave(2, dim=1)
    value = heads(attention.value(x), 2).repeat_interleave(2, dim=1)
    scores = (query @ key.transpose(2, 3)) / 4**0.5
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    mixed = functional.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ value
    expected = attention.output(mixed.transpose(1, 2).reshape(2, 5, 16))
    torch.testing.assert_close(attention(x, rotation), expected)


def test_rotated_products_depend_on_the_distance_alone() -> None:
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64).expand(1, 1, 6, 8)
    turned = rotate(x, compute_rotation(6, head_dim=8, like=x))[0, 0]
    torch.testing.assert_close(turned[5] @ turned[3], turned[2] @ turned[0])


def test_rotation_at_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, compute_rotation(1, head_dim=8, like=x)), x)


def test_presets_have_the_sizes_that_they_promise() -> None:
    def count_parameters(name: str) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in Decoder(PRESETS[name].shape).parameters())

    # 2 x 256 x 128 embedding and output + 4 layers x (128 x (128 + 64 + 64 + 128) + 3 x 128 x 352 + 2 x 128) + 128
    assert count_parameters("tiny") == 803_968
    assert 3e6 < count_parameters("small") < 6e6
    assert 100e6 < count_parameters("gpu") < 350e6
