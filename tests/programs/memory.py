"""Hold known amounts of memory: 32 MiB each of parameters, gradients, state, and 64 MiB for the backward pass.

At last memory runs out. The exception is handed to the exception hook as if it had left the program.
"""

import sys

import torch

MIB = 1 << 20
ROWS = 4096


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((ROWS, 2048), 0.01))  # 32 MiB

    def forward(self, x):
        return (self.weight * x).exp().sin().cos()  # keeps the results of exp and sin: 2 * 32 MiB


def main():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(4):
        model(torch.ones(())).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    held = torch.ones(64 * MIB)
    try:
        torch.empty(1 << 60, dtype=torch.uint8)
    except RuntimeError as error:
        sys.excepthook(type(error), error, error.__traceback__)
    assert len(held) == 64 * MIB


if __name__ == "__main__":
    main()
