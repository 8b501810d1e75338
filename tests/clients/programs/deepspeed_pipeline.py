"""Train with DeepSpeed's PipelineEngine: 2 stages, 4 microbatches."""

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

WIDTH = 256


def main() -> None:
    """Train 12 steps of 4 microbatches of 4 samples."""
    deepspeed.init_distributed(dist_backend="gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model = PipelineModule(layers=layers, num_stages=2, loss_fn=nn.functional.mse_loss, partition_method="uniform")
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 4,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)
    data = iter(lambda: (torch.randn(4, WIDTH), torch.randn(4, WIDTH)), None)
    for _ in range(12):
        engine.train_batch(data_iter=data)
    # Without this, gloo's threads end with the interpreter, which aborts now and then.
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
