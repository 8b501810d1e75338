"""Train a small Llama of fairseq2 on its gangs: `fairseq2_llama.py ddp|packed|fsdp2`."""

import sys
from typing import Any

import torch
from fairseq2.datasets import SequenceBatch
from fairseq2.gang import ProcessGroupGang, all_sum, create_fsdp_gangs, create_parallel_gangs
from fairseq2.models.llama.config import LLaMAConfig
from fairseq2.models.llama.factory import create_llama_model
from fairseq2.nn.ddp import to_ddp
from fairseq2.nn.fsdp.fsdp2 import to_fsdp2
from fairseq2.nn.utils.grad import clip_grad_norm

VOCABULARY, LENGTH, BATCH, STEPS = 64, 16, 4, 12
PACKED = [20, 30, 18]  # the last one loses a token to the shift of its labels


def shard(module: Any, wrap: Any) -> Any:
    """Shard the layers each for itself."""
    for layer in module.decoder.layers:
        wrap(layer)
    return module


def make_batch(how: str, generator: torch.Generator) -> SequenceBatch:
    """Return 4 sequences of 17 tokens, or 3 in one row of 68."""
    if how == "packed":
        ids = torch.randint(0, VOCABULARY, (sum(PACKED),), generator=generator)
        return SequenceBatch(ids, seq_lens=PACKED, packed=True)
    return SequenceBatch(torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator), seq_lens=None)


def main() -> None:
    """Train 12 steps; FSDP2 shards over 2 ranks, and replicates over the others."""
    how = sys.argv[1]
    root = ProcessGroupGang.create_default_process_group(torch.device("cpu"))
    gangs = create_parallel_gangs(root)
    torch.manual_seed(0)
    model = create_llama_model(
        LLaMAConfig(
            model_dim=32, max_seq_len=64, vocab_size=VOCABULARY, num_layers=2, num_attn_heads=2, num_key_value_heads=2,
            ffn_inner_dim=64, ffn_inner_dim_multiple_of=16,
        )
    )  # fmt: skip
    if how == "fsdp2":
        gangs = create_fsdp_gangs(gangs, 2)
        model = to_fsdp2(model, gangs, shard)
    else:
        model = to_ddp(model, gangs)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(root.rank)
    for _ in range(STEPS):
        inputs, targets = make_batch(how, generator).as_auto_regressive()
        seqs, layout = inputs.as_input()
        loss = model(seqs, layout, targets=targets.seqs, reduction="sum")
        count = all_sum(gangs.dp, targets.num_elements).item()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.mul_(gangs.dp.size / count)
        clip_grad_norm(model, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer
    root.close()


if __name__ == "__main__":
    main()
