"""Spend known times in every phase of a step: phases.py [mark].

Each step sleeps DELAY_S in the data set, the model, its recomputation, an autograd function's backward, the optimizer,
a checkpoint, the evaluation and a phase of its own. With `mark`, dtprof.step() says where steps end: every second time.
"""

import gc
import io
import sys
import time

import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

import dtprof

DELAY_S = 0.02
STEPS = 8


class Numbers(Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, i):
        time.sleep(DELAY_S)
        return torch.full((64,), float(i))


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        time.sleep(DELAY_S)
        return grad


class Inner(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 64)

    def forward(self, x):
        time.sleep(DELAY_S)  # once in the forward pass, once more when it is computed again
        return torch.relu(self.layer(x))


def evaluate(x):
    time.sleep(DELAY_S)
    return x


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.head = torch.nn.Linear(64, 1)

    def forward(self, x):
        hidden = (
            checkpoint(self.inner, x, use_reentrant=bool(int(x[0, 0].item()) % 2)) if self.training else evaluate(x)
        )
        return self.head(SlowBackward.apply(hidden))


class SlowState:
    def __getstate__(self):
        time.sleep(DELAY_S)
        return {}


@dtprof.phase("thinking")
def think():
    time.sleep(DELAY_S)


def main(marked):
    model = Model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(DELAY_S))
    for i, batch in enumerate(DataLoader(Numbers(), batch_size=1)):
        batch.requires_grad_()
        model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.save(SlowState(), io.BytesIO())
        model.eval()
        with torch.no_grad():
            model(batch)
        model.train()
        with dtprof.phase("checkpoint"):
            pass
        think()
        gc.collect()
        if marked and i % 2:
            dtprof.step()


if __name__ == "__main__":
    gc.disable()
    main("mark" in sys.argv[1:])
