"""Train two replicas with Streaming DiLoCo of torchft: 12 steps of 4 sequences each, a fragment averaged every 2."""

import subprocess
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

VOCABULARY, LENGTH, STEPS, SYNC_EVERY = 64, 16, 12, 4


def train(replica: int, lighthouse: str) -> None:
    """Train one replica of one rank."""
    torch.manual_seed(0)
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 16), nn.Linear(16, VOCABULARY))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    outer = [torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in model]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        load_state_dict=lambda state: model.load_state_dict(state["model"]),
        state_dict=lambda: {"model": model.state_dict()},
        min_replica_size=2,
        replica_id=f"replica_{replica}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
        use_async_quorum=False,
        lighthouse_addr=lighthouse,
        timeout=timedelta(seconds=30),
    )
    with DiLoCo(manager, list(model), optimizer, outer, sync_every=SYNC_EVERY, pin_memory=False):
        for _ in range(STEPS):
            ids = torch.randint(0, VOCABULARY, (4, LENGTH))
            loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    manager.shutdown()


def main() -> None:
    """Start a lighthouse and both replicas."""
    if len(sys.argv) > 1:
        train(int(sys.argv[1]), sys.argv[2])
        return
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=2)
    replicas = [subprocess.Popen([sys.executable, __file__, str(number), lighthouse.address()]) for number in range(2)]
    failed = [replica.wait() for replica in replicas]
    lighthouse.shutdown()
    sys.exit(max(map(abs, failed)))


if __name__ == "__main__":
    main()
