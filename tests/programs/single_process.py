"""Train in one process without torch.distributed, in all the ways that steps are counted; end in an exception.

Steps: 3 plain (workers forked), 2 of three backward passes each, 2 with two optimizers, 1 skipped by the scaler,
1 not skipped, 1 plain (workers spawned).
"""

import torch
from torch.utils.data import DataLoader, TensorDataset

MODEL = torch.nn.Linear(4, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.01)


def loader(context):
    data = TensorDataset(torch.ones(3, 4))
    return DataLoader(data, batch_size=1, num_workers=2, multiprocessing_context=context)


def backward():
    MODEL(torch.ones(1, 4)).sum().backward()


def fail():
    raise ValueError("planned")


def main():
    for _ in loader("fork"):
        backward()
        OPTIMIZER.step()

    for _ in range(2):
        for _ in range(3):
            backward()
        OPTIMIZER.step()

    weight, bias = (torch.optim.Adam([parameter]) for parameter in MODEL.parameters())
    for _ in range(2):
        backward()
        weight.step()
        bias.step()

    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for factor in (float("inf"), 1.0):
        OPTIMIZER.zero_grad()
        scaler.scale(MODEL(torch.ones(1, 4)).sum() * factor).backward()
        scaler.step(OPTIMIZER)
        scaler.update()

    next(iter(loader("spawn")))
    backward()
    OPTIMIZER.step()
    fail()


if __name__ == "__main__":
    main()
