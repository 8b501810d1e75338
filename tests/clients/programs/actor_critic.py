"""Train an actor and its critic by turns on the same ids, each with a backward pass and an optimizer of its own."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH = 64, 16


class Model(nn.Module):
    """A recurrent model of ids."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.recurrent = nn.GRU(32, 32, batch_first=True)
        self.head = nn.Linear(32, outputs)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.recurrent(self.embedding(ids))[0])


def main() -> None:
    """Train both on 4 sequences a rank, 20 times: 40 steps, of which the actor's count."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    actor, critic = DistributedDataParallel(Model(VOCABULARY)), DistributedDataParallel(Model(1))
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (actor, critic)]
    for _ in range(20):
        with torch.no_grad():
            ids = torch.randint(0, VOCABULARY, (4, 1))
            while ids.shape[1] < LENGTH:
                chosen = torch.distributions.Categorical(logits=actor.module(ids)[:, -1]).sample()
                ids = torch.cat([ids, chosen[:, None]], dim=1)
        rewards = torch.randn(4, LENGTH)
        loss = nn.functional.cross_entropy(actor(ids).flatten(0, 1), ids.flatten(), reduction="none")
        (loss * rewards.flatten()).mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        (critic(ids).squeeze(-1) - rewards).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    del actor, critic
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
