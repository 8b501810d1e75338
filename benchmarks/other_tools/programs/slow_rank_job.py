"""Three ranks of DDP; preprocessing takes rank 1 40 ms longer in each step."""

import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from watched_steps import training  # type: ignore[import-not-found]


class Samples(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 16 * 30

    def __getitem__(self, index: int) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(0.040 / 16)
        return torch.full((512,), index / 480)


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(6))))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    with training(model) as step:
        for batch in DataLoader(Samples(), batch_size=16):
            with step():
                optimizer.zero_grad()
                model(batch).square().mean().backward()
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
