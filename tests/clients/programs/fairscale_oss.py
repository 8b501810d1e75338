"""Train with FairScale's OSS and ShardedDataParallel."""

import torch
from fairscale.nn.data_parallel import ShardedDataParallel
from fairscale.optim.oss import OSS
from torch import nn

VOCABULARY, LENGTH = 64, 16


def main() -> None:
    """Train 12 steps of 4 sequences a rank."""
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    body = nn.Sequential(nn.Embedding(VOCABULARY, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, VOCABULARY))
    optimizer = OSS(body.parameters(), optim=torch.optim.Adam, lr=1e-3)
    model = ShardedDataParallel(body, optimizer)
    for _ in range(12):
        ids = torch.randint(0, VOCABULARY, (4, LENGTH))
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    del model, optimizer, body  # its hooks hold work of the group
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
