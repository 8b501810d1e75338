"""Train with experts on the ranks of groups made by `new_group`, and gradients averaged by hand: 4 ranks."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn.functional import all_to_all_single

VOCABULARY, LENGTH, WIDTH = 64, 16, 32


class Experts(nn.Module):
    """An expert a rank; each half of the tokens goes to one of two."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.expert = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        sent = values.reshape(-1, WIDTH)
        taken = self.expert(all_to_all_single(torch.empty_like(sent), sent, group=self.group))
        return all_to_all_single(torch.empty_like(taken), taken, group=self.group).view(values.shape)


def main() -> None:
    """Train 12 steps of 4 sequences a rank."""
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    of_experts = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    of_replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    experts = Experts(of_experts)
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), experts, nn.Linear(WIDTH, VOCABULARY))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    shared = {id(parameter) for parameter in experts.parameters()}
    generator = torch.Generator().manual_seed(rank)
    for _ in range(12):
        ids = torch.randint(0, VOCABULARY, (4, LENGTH), generator=generator)
        nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=of_replicas if id(parameter) in shared else None)
            parameter.grad /= world
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
