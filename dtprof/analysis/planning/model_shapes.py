"""The size of a model: from its number of parameters, or from a configuration of HF, torchtitan or Megatron."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from dtprof.errors import UsageError

MIN_PARAMETERS, MAX_PARAMETERS = 1e5, 1e14
HEAD_SIZE = 128
WIDE = 1024
KEYS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num-layers", "encoder_layers"),
    "hidden": ("hidden_size", "n_embd", "dim", "d_model", "hidden-size"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num-attention-heads", "encoder_attention_heads"),
    "kv_heads": ("num_key_value_heads", "n_kv_heads", "num_query_groups", "num-query-groups"),
    "feed_forward": (
        "intermediate_size",
        "n_inner",
        "ffn_hidden_size",
        "ffn-hidden-size",
        "hidden_dim",
        "encoder_ffn_dim",
    ),
    "vocabulary": ("vocab_size", "padded_vocab_size", "padded-vocab-size", "vocab-size"),
    "sequence": ("max_position_embeddings", "n_positions", "seq_length", "seq-length", "seq_len", "max_seq_len"),
    "experts": ("num_local_experts", "num_experts", "n_routed_experts", "num-experts", "num_moe_experts"),
    "active_experts": ("num_experts_per_tok", "moe_router_topk", "moe-router-topk", "top_k"),
}
"""Names of each size in configurations of HF, torchtitan and Megatron."""
REQUIRED = ("layers", "hidden", "heads")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder of equal layers."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    feed_forward: int
    vocabulary: int
    sequence: int
    experts: int = 1
    active_experts: int = 1
    parameters: float = 0.0  # as given; 0: those of the shape
    inferred: bool = False  # from the number of parameters alone

    @property
    def layer_parameters(self) -> float:
        """Return the parameters of one layer: attention, and a feed-forward of three matrices for each expert."""
        kv = self.hidden * self.kv_heads / self.heads
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * kv
        return attention + 3 * self.hidden * self.feed_forward * self.experts

    @property
    def expert_share(self) -> float:
        """Return the share of a layer's parameters that are of experts; 0 without."""
        return 3 * self.hidden * self.feed_forward * self.experts / self.layer_parameters if self.experts > 1 else 0.0

    @property
    def embedding_parameters(self) -> float:
        """Return the parameters of the embedding; the output has as many."""
        return float(self.vocabulary * self.hidden)

    @property
    def total_parameters(self) -> float:
        """Return all parameters."""
        return self.parameters or self.layers * self.layer_parameters + 2 * self.embedding_parameters

    @property
    def flops_per_token(self) -> float:
        """Return model FLOPs a token: 6 N_matmul + 12 L h s, of experts only the active ones."""
        inactive = 3 * self.hidden * self.feed_forward * (self.experts - self.active_experts) * self.layers
        matmul = self.total_parameters - self.embedding_parameters - inactive
        return 6 * max(0.0, matmul) + 12 * self.layers * self.hidden * self.sequence


def infer_shape(parameters: float, *, sequence: int = 4096) -> ModelShape:
    """Return a decoder of so many parameters as they are built: about 128 times as wide as it has layers.

    Raises:
        UsageError: no model has so many.
    """
    if not MIN_PARAMETERS <= parameters <= MAX_PARAMETERS:
        raise UsageError(f"--params is {parameters:g}; expected {MIN_PARAMETERS:g} to {MAX_PARAMETERS:g}, such as 7e9")
    # A layer has 12 h^2 parameters, and h is 128 times the layers.
    width = (parameters * HEAD_SIZE / 12) ** (1 / 3)
    # Wide models have heads that tensor parallelism can divide.
    unit = WIDE if width >= 4 * WIDE else HEAD_SIZE
    hidden = max(unit, unit * round(width / unit))
    layers = max(1, round(parameters / (12 * hidden * hidden)))
    layers = 4 * round(layers / 4) if layers >= 8 else layers
    heads = max(1, hidden // HEAD_SIZE)
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        feed_forward=round(8 * hidden / 3),
        vocabulary=32_000,
        sequence=sequence,
        parameters=parameters,
        inferred=True,
    )


def read_shape(path: Path, *, sequence: int | None = None) -> ModelShape:
    """Return the model that a configuration describes.

    Raises:
        UsageError: it cannot be read, or lacks a size.
    """
    found = {}
    values = _flatten(_load(path))
    for name, keys in KEYS.items():
        number = next((values[key] for key in keys if key in values), None)
        if number is not None:
            if not 1 <= number < MAX_PARAMETERS or number != int(number):
                raise UsageError(f"{path}: {name} is {number:g}; expected a whole number of 1 or more")
            found[name] = int(number)
    missing = [name for name in REQUIRED if name not in found]
    if missing:
        names = "; ".join(f"{name}: {', '.join(KEYS[name][:3])}" for name in missing)
        raise UsageError(f"{path} has no {', '.join(missing)}; expected a configuration of a model with {names}")
    hidden = found["hidden"]
    if hidden % found["heads"]:
        raise UsageError(f"{path}: hidden size {hidden} is no multiple of {found['heads']} heads; expected one that is")
    return ModelShape(
        layers=found["layers"],
        hidden=hidden,
        heads=found["heads"],
        kv_heads=found.get("kv_heads", found["heads"]),
        feed_forward=found.get("feed_forward", round(8 * hidden / 3)),
        vocabulary=found.get("vocabulary", 32_000),
        sequence=sequence or found.get("sequence", 4096),
        experts=found.get("experts", 1),
        active_experts=min(found.get("active_experts", 1), found.get("experts", 1)),
    )


def _load(path: Path) -> Any:
    """Return the document: JSON, TOML, or lines `name: number` and `--name number`."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"{path} cannot be read ({type(error).__name__}); expected a configuration of a model"
        ) from None
    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        pass
    pairs = re.findall(r"^\s*(?:--)?([\w-]+)\s*[:= ]\s*([0-9.eE+_]+)\s*\\?\s*$", text, re.MULTILINE)
    return {name: _number(value) for name, value in pairs}


def _number(text: str) -> float | None:
    try:
        return float(text.replace("_", ""))
    except ValueError:
        return None


def _flatten(document: Any) -> dict[str, float]:
    """Return all numbers of a document by their names; of a name that occurs more than once the first."""
    found: dict[str, float] = {}
    if isinstance(document, dict):
        for name, value in document.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
                found.setdefault(str(name), float(value))
        for value in document.values():
            for name, number in _flatten(value).items():
                found.setdefault(name, number)
    return found
