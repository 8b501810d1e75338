"""Train with the Trainer of transformers on batches of unequal lengths, gradients accumulated over 4 of them."""

import sys
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

VOCABULARY = 100


class Reviews(Dataset[tuple[list[int], int]]):
    """Random texts of 8 to 39 ids."""

    def __len__(self) -> int:
        return 512

    def __getitem__(self, index: int) -> tuple[list[int], int]:
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(8, 40, (1,), generator=generator))
        return torch.randint(1, VOCABULARY, (length,), generator=generator).tolist(), index % 2


def pad(reviews: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    """Return a batch as long as its longest text."""
    ids = torch.zeros(len(reviews), max(len(text) for text, _ in reviews), dtype=torch.long)
    for row, (text, _) in zip(ids, reviews, strict=True):
        row[: len(text)] = torch.tensor(text)
    return {"input_ids": ids, "attention_mask": ids.sign(), "labels": torch.tensor([label for _, label in reviews])}


def main() -> None:
    """Train 12 steps of 16 texts a rank, evaluate three times, and write how many tokens the Trainer has seen."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    arguments = TrainingArguments(
        output_dir=sys.argv[1],
        max_steps=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        eval_strategy="steps",
        eval_steps=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        include_num_input_tokens_seen="all",
    )
    trainer = Trainer(
        BertForSequenceClassification(config), arguments, pad, train_dataset=Reviews(), eval_dataset=Reviews()
    )
    trainer.train()
    if arguments.process_index == 0:
        (Path(sys.argv[1]) / "tokens").write_text(str(trainer.state.num_input_tokens_seen))


if __name__ == "__main__":
    main()
