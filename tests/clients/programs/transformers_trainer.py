"""Train with the Trainer of transformers."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

VOCABULARY, LENGTH = 64, 16


class Sequences(Dataset[dict[str, torch.Tensor]]):
    """Random sequences."""

    def __len__(self) -> int:
        return 192

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def main() -> None:
    """Train 12 steps of 4 sequences a rank, and evaluate twice."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2))
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=12,
        per_device_train_batch_size=4,
        eval_strategy="steps",
        eval_steps=6,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=Sequences(), eval_dataset=Sequences())
    if "marked" in sys.argv:
        from dtprof.integrations import transformers_callback

        trainer.add_callback(transformers_callback())
    trainer.train()


if __name__ == "__main__":
    main()
