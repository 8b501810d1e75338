"""Two peers of hivemind that average gradients over their own network, each a process of its own."""

import functools
import subprocess
import sys
import time

import hivemind
import torch
from torch import nn

EPOCHS, VOCABULARY, LENGTH = 6, 64, 16
LOCAL = ["/ip4/127.0.0.1/tcp/0"]


def train(*initial_peers: str) -> None:
    """Train with the other peer: 32 samples an epoch, of which a peer gives 4 a batch."""
    torch.manual_seed(0)
    dht = hivemind.DHT(initial_peers=list(initial_peers), host_maddrs=LOCAL, start=True)
    model = nn.Sequential(nn.Embedding(VOCABULARY, 32), nn.Linear(32, VOCABULARY))
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="client",
        params=model.parameters(),
        optimizer=functools.partial(torch.optim.Adam, lr=1e-3),
        batch_size_per_step=4,
        target_batch_size=32,
        matchmaking_time=1.5,
        averaging_timeout=30.0,
        averager_opts={"request_timeout": 0.7},
        tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2},
    )
    while optimizer.local_epoch < EPOCHS:
        ids = torch.randint(0, VOCABULARY, (4, LENGTH))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        time.sleep(0.5)  # an epoch is to last longer than the peers take to find each other
    optimizer.shutdown()
    dht.shutdown()


def main() -> None:
    """Start a node that the peers know, and both peers."""
    node = hivemind.DHT(host_maddrs=LOCAL, start=True)
    known = [str(address) for address in node.get_visible_maddrs()]
    peers = [subprocess.Popen([sys.executable, __file__, *known]) for _ in range(2)]
    statuses = [peer.wait() for peer in peers]
    node.shutdown()
    sys.exit(max(map(abs, statuses)))


if __name__ == "__main__":
    train(*sys.argv[1:]) if sys.argv[1:] else main()
