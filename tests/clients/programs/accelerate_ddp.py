"""Train with Accelerate a transformers model in eval mode, as `from_pretrained` leaves it.

With `marked FOLDER` steps and phases are marked, and the state is saved once.
"""

import sys

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

VOCABULARY, LENGTH = 64, 16


def main() -> None:
    """Train 12 steps of 4 sequences a rank, gradients accumulated over 2 batches."""
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randint(0, VOCABULARY, (192, LENGTH)))
    loader = DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    if "marked" in sys.argv:
        from dtprof.integrations import mark_accelerate

        mark_accelerate(accelerator, optimizer)
    for number, (ids,) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(input_ids=ids, labels=ids).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if "marked" in sys.argv:
            accelerator.gather_for_metrics(loss.detach())
        if "marked" in sys.argv and number == 11:
            accelerator.save_state(sys.argv[2])


if __name__ == "__main__":
    main()
