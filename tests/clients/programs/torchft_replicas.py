"""Fault-tolerant data parallelism of torchft: two replicas, the second of which fails once and comes back."""

import os
import subprocess
import sys
from datetime import timedelta

import torch
import torchft
from torch import nn
from torchft.coordination import LighthouseServer

STEPS, FAILS_AT, VOCABULARY, LENGTH = 12, 6, 64, 16
PATIENCE = timedelta(seconds=120)


def train() -> None:
    """Train a replica of one rank: 12 steps, 4 sequences each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=PATIENCE),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=2,
        replica_id=f"replica_{os.environ['REPLICA_GROUP_ID']}_",
        timeout=PATIENCE,
        quorum_timeout=PATIENCE,
    )
    wrapped, optimizer = torchft.DistributedDataParallel(manager, model), torchft.Optimizer(manager, inner)
    while manager.current_step() < STEPS:
        ids = torch.randint(0, VOCABULARY, (4, LENGTH))
        optimizer.zero_grad()
        nn.functional.cross_entropy(wrapped(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        if manager.current_step() == FAILS_AT and os.environ.get("FAILS"):
            os._exit(3)
    manager.shutdown()


def main() -> None:
    """Start the replicas, each with a launcher of its own; start the second anew when it has failed."""
    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, quorum_tick_ms=50)
    environment = os.environ | {"TORCHFT_LIGHTHOUSE": lighthouse.address()}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", __file__, "rank"]

    def start(replica: int, **more: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment | {"REPLICA_GROUP_ID": str(replica), **more})

    whole, failing = start(0), start(1, FAILS="1")
    failing.wait()
    again = start(1)
    statuses = [again.wait(), whole.wait()]
    lighthouse.shutdown()
    sys.exit(max(map(abs, statuses)))


if __name__ == "__main__":
    train() if sys.argv[1:] else main()
