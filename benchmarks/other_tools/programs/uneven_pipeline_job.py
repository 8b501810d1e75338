"""A 1F1B pipeline of two stages and four microbatches; the second stage has three times the layers of the first."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from watched_steps import training  # type: ignore[import-not-found]


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    layers = [torch.nn.Linear(768, 768) for _ in range((2, 6)[rank])]
    stage = PipelineStage(torch.nn.Sequential(*layers), rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), lr=1e-3)
    batch = torch.ones(128, 768)
    with training(stage.submod) as step:
        for _ in range(12):
            with step():
                optimizer.zero_grad()
                if rank == 0:
                    schedule.step(batch)
                else:
                    schedule.step(target=batch)
                optimizer.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
