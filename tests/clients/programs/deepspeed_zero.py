"""Train with DeepSpeed: ZeRO of the stage given as argument, in bf16; `offload` or `accumulate`."""

import gc
import sys

import deepspeed
import torch
from torch import nn

VOCABULARY, LENGTH = 64, 16


class Model(nn.Module):
    """A linear language model that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Embedding(VOCABULARY, 64), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, VOCABULARY)
        )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.body(ids).flatten(0, 1).float(), ids.flatten())


def main() -> None:
    """Train 12 steps of 4 sequences a rank, or of 4 times as many."""
    stage = int(sys.argv[1])
    torch.manual_seed(0)
    model = Model()
    zero: dict[str, object] = {"stage": stage}
    accumulated = 4 if "accumulate" in sys.argv else 1
    if "offload" in sys.argv:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": accumulated,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": True},
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for _ in range(12 * accumulated):
        loss = engine(torch.randint(0, VOCABULARY, (4, LENGTH)))
        engine.backward(loss)
        engine.step()
    engine.destroy()
    del engine, loss, model
    gc.collect()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
