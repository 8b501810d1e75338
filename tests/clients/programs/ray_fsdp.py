"""Train with Ray Train's TorchTrainer: 2 workers on gloo, which shard a model by FSDP2: `ray_fsdp.py FOLDER`."""

import sys
from pathlib import Path

import ray
import ray.train
import torch
from ray.train.torch import TorchTrainer, prepare_data_loader
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, LENGTH = 64, 16


def train() -> None:
    """Train 12 steps of 4 sequences a rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, 128), nn.Linear(128, VOCABULARY))
    mesh = init_device_mesh("cpu", (ray.train.get_context().get_world_size(),), mesh_dim_names=("data",))
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    texts = TensorDataset(torch.randint(0, VOCABULARY, (96, LENGTH)))
    for step, (ids,) in enumerate(prepare_data_loader(DataLoader(texts, batch_size=4))):
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        ray.train.report({"step": step, "loss": loss.item()})


def main() -> None:
    """Start Ray on this machine, and train."""
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    TorchTrainer(
        train,
        scaling_config=ray.train.ScalingConfig(num_workers=2),
        run_config=ray.train.RunConfig(storage_path=str(Path(sys.argv[1]).absolute())),
    ).fit()
    ray.shutdown()


if __name__ == "__main__":
    main()
