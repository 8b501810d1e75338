"""Train a small model with Lightning's DDP strategy, with dtprof's callback where the argument is `marked`."""

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH = 64, 16


class Model(lightning.LightningModule):
    """A linear language model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Embedding(VOCABULARY, 64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, VOCABULARY)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.body(ids)

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        (ids,) = batch
        return nn.functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten())

    def validation_step(self, batch: list[torch.Tensor], _: int) -> None:
        (ids,) = batch
        self.log("loss", nn.functional.cross_entropy(self(ids).flatten(0, 1), ids.flatten()), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train 12 steps of 4 sequences a rank, and validate once."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(0, VOCABULARY, (96, LENGTH)))
    callbacks = []
    if "marked" in sys.argv:
        from dtprof.integrations import lightning_callback

        callbacks.append(lightning_callback())
    trainer = lightning.Trainer(
        callbacks=callbacks,
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_steps=12,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        num_sanity_val_steps=0,
        limit_val_batches=2,
    )
    trainer.fit(Model(), DataLoader(data, batch_size=4), DataLoader(data, batch_size=4))


if __name__ == "__main__":
    main()
