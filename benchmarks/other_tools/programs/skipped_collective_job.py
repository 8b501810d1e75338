"""Three ranks of DDP; rank 1 leaves the mean of the loss out in step 12, so that all wait for ever."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from watched_steps import training  # type: ignore[import-not-found]


def mean_over_ranks(loss: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(loss, group=group)
    return loss / dist.get_world_size()


def main() -> None:
    dist.init_process_group("gloo")
    of_loss = dist.new_group(group_desc="loss")
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with training(model) as step:
        for number in range(20):
            with step():
                loss = model(torch.ones(8, 256)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if not (number == 12 and dist.get_rank() == 1):
                    mean_over_ranks(loss.detach(), of_loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
