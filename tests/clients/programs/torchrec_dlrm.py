"""Train torchrec's DLRM, tables sharded by its planner: `torchrec_dlrm.py table_wise|row_wise|data_parallel|mixed`."""

import sys

import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

TABLES, ROWS, WIDTH, DENSE, BATCH, STEPS = 4, 128, 16, 13, 8, 12
KINDS = ("table_wise", "column_wise", "data_parallel", "table_column_wise")


def make_batch(generator: torch.Generator) -> Batch:
    """Return 8 samples with one to three ids for each table."""
    keys = [f"f{number}" for number in range(TABLES)]
    lengths = torch.randint(1, 4, (TABLES * BATCH,), generator=generator)
    ids = torch.randint(0, ROWS, (int(lengths.sum()),), generator=generator)
    return Batch(
        dense_features=torch.rand(BATCH, DENSE, generator=generator),
        sparse_features=KeyedJaggedTensor(keys, ids, lengths=lengths),
        labels=torch.randint(0, 2, (BATCH,), generator=generator),
    )


def main() -> None:
    """Train 12 steps of 8 samples a rank."""
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    device = torch.device("cpu")
    tables = [
        EmbeddingBagConfig(
            name=f"t{number}", embedding_dim=WIDTH, num_embeddings=ROWS, feature_names=[f"f{number}"]
        )
        for number in range(TABLES)
    ]  # fmt: skip
    dlrm = DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=device),
        dense_in_features=DENSE, dense_arch_layer_sizes=[32, WIDTH], over_arch_layer_sizes=[32, 1],
    )  # fmt: skip
    apply_optimizer_in_backward(torch.optim.SGD, dlrm.sparse_arch.parameters(), {"lr": 0.1})
    kinds = [sys.argv[1]] * TABLES if sys.argv[1] != "mixed" else list(KINDS)
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=size, compute_device="cpu", local_world_size=size),
        constraints={
            table.name: ParameterConstraints(sharding_types=[kind]) for table, kind in zip(tables, kinds, strict=True)
        },
    )
    sharders = [EmbeddingBagCollectionSharder()]
    plan = planner.collective_plan(DLRMTrain(dlrm), sharders, dist.group.WORLD)
    model = DistributedModelParallel(DLRMTrain(dlrm), device=device, plan=plan, sharders=sharders)
    dense = KeyedOptimizerWrapper(
        dict(model.named_parameters()) if sys.argv[1] == "data_parallel" else {
            name: part for name, part in model.named_parameters() if "sparse_arch" not in name
        },
        lambda parts: torch.optim.Adam(parts, lr=1e-3),
    )  # fmt: skip
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        batch = make_batch(generator)
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(f"loss {loss.item():.6f}")
    del model, optimizer
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
