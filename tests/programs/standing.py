"""Three forked ranks that train one step and then stand still, one of them elsewhere, until standard input ends."""

import os
import signal

import torch


def waits_for_its_peers():
    signal.pause()


def stands_elsewhere():
    signal.pause()


def train(rank):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    os.write(1, b"stands\n")
    stands_elsewhere() if rank == 1 else waits_for_its_peers()


if __name__ == "__main__":
    os.environ["WORLD_SIZE"] = "3"
    for rank in range(3):
        if os.fork() == 0:
            os.environ["RANK"] = str(rank)
            train(rank)
    for _ in range(3):
        os.wait()
