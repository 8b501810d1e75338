"""Two ranks of DDP; rank 1 keeps the output of each step: 2 MiB more in each."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from watched_steps import training  # type: ignore[import-not-found]


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4))))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    with training(model) as step:
        for _ in range(40):
            with step():
                output = model(torch.rand(2048, 256))
                loss = output.square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(output if dist.get_rank() == 1 else loss.item())
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
