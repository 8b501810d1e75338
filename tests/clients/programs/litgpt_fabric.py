"""Train litgpt's model as its `pretrain` does, by Fabric with DDP: 12 steps of 2 batches of 4 sequences a rank."""

import lightning
import torch
from litgpt import GPT, Config
from litgpt.utils import chunked_cross_entropy
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH = 64, 16


def main() -> None:
    """Accumulate gradients over two batches, clip them, and average the loss over ranks."""
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    config = Config(
        block_size=LENGTH, vocab_size=VOCABULARY, padded_vocab_size=VOCABULARY, n_layer=2, n_head=2, n_embd=32
    )
    model = fabric.setup(GPT(config))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-3))
    data = TensorDataset(torch.randint(0, VOCABULARY, (192, LENGTH + 1)))
    for number, (ids,) in enumerate(fabric.setup_dataloaders(DataLoader(data, batch_size=4))):
        accumulates = number % 2 == 0
        with fabric.no_backward_sync(model, enabled=accumulates):
            logits = model(ids[:, :LENGTH].contiguous())
            loss = chunked_cross_entropy(logits, ids[:, 1:].contiguous(), chunk_size=0)
            fabric.backward(loss / 2)
        if not accumulates:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            fabric.all_reduce(loss.detach())


if __name__ == "__main__":
    main()
