import pytest
import torch
from torch import nn
from torch.nn import functional

from reference_trainer.models import Bart, Decoder, build_model, count_parameters, initialise_weights
from reference_trainer.models.attention import MultiHeadAttention
from reference_trainer.models.decoder import Attention, compute_rotation, rotate
from reference_trainer.presets import PRESETS, BartShape, DecoderShape, ModelShape

DECODER = DecoderShape(num_layers=4, dim=16, num_heads=4, num_kv_heads=2, hidden_dim=24)
BART = BartShape(num_encoder_layers=2, num_decoder_layers=3, dim=16, num_heads=4, hidden_dim=24, max_length=32)


def build(shape: ModelShape) -> nn.Module:
    model = build_model(shape).double()
    initialise_weights(model, seed=0, num_layers=shape.num_layers)
    return model


def draw_batch(*, rows: int = 2, length: int = 10) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    inputs, encoder_inputs = torch.randint(256, (2, rows, length), generator=generator)
    mask = torch.arange(length) < torch.tensor([length, length - 4])[:, None]
    return {"inputs": inputs, "encoder_inputs": encoder_inputs, "encoder_mask": mask}


def run_in_stages(shape: ModelShape, cuts: list[int], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    carried: tuple[torch.Tensor, ...] = ()
    for first, end in zip([0, *cuts], [*cuts, shape.num_layers], strict=True):
        part = build(shape)
        part.keep_layers(first, end)  # type: ignore[operator]
        outputs = part(*carried, **batch)
        carried = outputs if isinstance(outputs, tuple) else (outputs,)
    return carried[0]


def test_logits_have_one_row_a_position_and_one_column_a_token() -> None:
    batch = draw_batch(length=7)
    assert build(DECODER)(inputs=batch["inputs"]).shape == (2, 7, 256)
    assert build(BART)(**batch).shape == (2, 7, 264)


def test_a_token_changes_no_logit_before_it() -> None:
    batch = draw_batch()
    changed = batch["inputs"].clone()
    changed[0, 6] = (changed[0, 6] + 1) % 256
    for shape, rest in ((DECODER, {}), (BART, batch)):
        model = build(shape)
        before = model(**{**rest, "inputs": batch["inputs"]})
        after = model(**{**rest, "inputs": changed})
        torch.testing.assert_close(before[:, :6], after[:, :6], rtol=0, atol=0)
        assert all((before[0, position] - after[0, position]).abs().max() > 1e-9 for position in range(6, 10))


def test_the_encoder_sees_all_but_the_padding() -> None:
    model, batch = build(BART), draw_batch()
    before = model(**batch)
    seen, padding = batch["encoder_inputs"].clone(), batch["encoder_inputs"].clone()
    seen[1, 0] = (seen[1, 0] + 1) % 256
    padding[1, 6:] = 3  # the mask of row 1 ends at 6
    assert (model(**{**batch, "encoder_inputs": seen})[1] - before[1]).abs().amax(dim=-1).min() > 1e-9
    torch.testing.assert_close(model(**{**batch, "encoder_inputs": padding}), before, rtol=0, atol=0)


@pytest.mark.parametrize("cuts", [[1], [2], [3], [1, 2], [1, 2, 3], [2, 4]])
def test_a_model_cut_into_stages_is_the_same_model(cuts: list[int]) -> None:
    batch = draw_batch()
    torch.testing.assert_close(run_in_stages(BART, cuts, batch), build(BART)(**batch), rtol=0, atol=0)
    if max(cuts) < DECODER.num_layers:
        inputs = {"inputs": batch["inputs"]}
        torch.testing.assert_close(run_in_stages(DECODER, cuts, inputs), build(DECODER)(**inputs), rtol=0, atol=0)


def test_stages_hold_every_weight_under_its_name_and_only_the_tied_embedding_twice() -> None:
    whole = {name for name, _ in build(BART).named_parameters()}
    parts = []
    for first, end in ((0, 1), (1, 3), (3, 4), (4, 5)):
        part = build(BART)
        part.keep_layers(first, end)  # type: ignore[operator]
        parts.append({name for name, _ in part.named_parameters()})
    assert set.union(*parts) == whole
    assert sum(map(len, parts)) == len(whole) + 2
    assert ["embedding.weight" in part for part in parts] == [True, True, False, True]


def test_attention_is_that_of_torch() -> None:
    torch.manual_seed(0)
    ours = build(BART).encoder_layers["0"].attention  # type: ignore[index,union-attr]
    assert isinstance(ours, MultiHeadAttention)
    theirs = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    with torch.no_grad():
        projections = (ours.query, ours.key, ours.value)
        theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
        theirs.out_proj.load_state_dict(ours.output.state_dict())
    x, source = torch.randn(2, 3, 6, 16, dtype=torch.float64)
    mask = torch.arange(6) < torch.tensor([6, 4, 1])[:, None]
    expected, _ = theirs(x, source, source, key_padding_mask=~mask)
    torch.testing.assert_close(ours(x, source, key_mask=mask), expected)


def test_grouped_heads_equal_full_attention_with_repeated_key_value_heads() -> None:
    attention = Attention(dim=16, num_heads=4, num_kv_heads=2, head_dim=4, bias=False).double()
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    rotation = compute_rotation(torch.arange(5), head_dim=4, dtype=torch.float64)

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
    turned = rotate(x, compute_rotation(torch.arange(6), head_dim=8, dtype=x.dtype))[0, 0]
    torch.testing.assert_close(turned[5] @ turned[3], turned[2] @ turned[0])


def test_rotation_at_position_zero_changes_nothing() -> None:
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)
    torch.testing.assert_close(rotate(x, compute_rotation(torch.arange(1), head_dim=8, dtype=x.dtype)), x)


def test_weights_depend_on_seed_and_name_alone() -> None:
    one, other = build(BART), build_model(BART).double()
    initialise_weights(other, seed=1, num_layers=5)
    name = "decoder_layers.2.cross_attention.key.weight"
    cut = build(BART)
    cut.keep_layers(4, 5)  # type: ignore[operator]
    assert torch.equal(cut.get_parameter(name), one.get_parameter(name))
    assert not torch.equal(other.get_parameter(name), one.get_parameter(name))
    assert not torch.equal(one.get_parameter(name), one.get_parameter(name.replace("key", "query")))


def test_presets_have_the_sizes_that_they_promise() -> None:
    def count(preset: str, model: str) -> int:
        return count_parameters(PRESETS[preset].shapes[model])

    # 2 x 256 x 128 embedding and output + 4 layers x (128 x (128 + 64 + 64 + 128) + 3 x 128 x 352 + 2 x 128) + 128
    assert count("tiny", "gpt") == 803_968
    assert 3e6 < count("small", "gpt") < 6e6
    assert 100e6 < count("gpu", "gpt") < 350e6
    assert 1e9 < count("1b", "gpt") < 1.5e9
    assert 6.5e9 < count("7b", "gpt") < 8e9
    # The paper: 140 M; Hugging Face counts 139.4 M and 406.3 M, with 50,265 tokens and two more positions a side.
    assert count("bart-base", "bart") == pytest.approx(139_420_416 + 7 * 768 - 4 * 768, rel=1e-9)
    assert count("bart-large", "bart") == pytest.approx(406_291_456 + 7 * 1024 - 4 * 1024, rel=1e-9)


def test_models_are_what_their_shapes_say() -> None:
    assert isinstance(build_model(DECODER), Decoder)
    assert isinstance(build_model(BART), Bart)
