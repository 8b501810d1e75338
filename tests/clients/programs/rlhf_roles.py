"""A loop of reinforcement learning from feedback in one job: actors, a reward model and a critic on ranks of their own.

Ranks 0 and 1 hold the actor (DDP) and a frozen reference of it, rank 2 the reward model, rank 3 the critic. Of each
iteration the actors step twice, the critic once, and the reward model never.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

ACTORS, REWARD, CRITIC = (0, 1), 2, 3
ITERATIONS, BATCH, PROMPT, LENGTH, VOCABULARY, WIDTH = 8, 4, 4, 16, 64, 64


def language_model(outputs: int) -> nn.Sequential:
    """Return a model over sequences, with so many outputs a token."""
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, outputs))


def generate(model: nn.Module, prompts: torch.Tensor) -> torch.Tensor:
    """Return the prompts with tokens drawn one after the other."""
    ids = prompts
    with torch.no_grad():
        while ids.shape[1] < LENGTH:
            drawn = torch.multinomial(model(ids)[:, -1].softmax(-1), 1)
            ids = torch.cat([ids, drawn], 1)
    return ids


def log_probabilities(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """Return the logarithm of the probability of each token but the first."""
    return model(ids[:, :-1]).log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def act(group: dist.ProcessGroup) -> None:
    """Generate, have the reward model and the critic judge it, and train."""
    actor, reference = language_model(VOCABULARY), language_model(VOCABULARY)
    reference.load_state_dict(actor.state_dict())
    replicated = DistributedDataParallel(actor, process_group=group)
    optimizer = torch.optim.Adam(actor.parameters(), lr=1e-3)
    for _ in range(ITERATIONS):
        ids = generate(actor, torch.randint(0, VOCABULARY, (BATCH, PROMPT)))
        rewards, values = torch.empty(BATCH), torch.empty(BATCH)
        for judge, judged in ((REWARD, rewards), (CRITIC, values)):
            dist.send(ids, judge)
            dist.recv(judged, judge)
        with torch.no_grad():
            before = log_probabilities(reference, ids)
        for _ in range(2):
            ratio = (log_probabilities(replicated, ids) - before).exp()
            loss = -(ratio * (rewards - values)[:, None]).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def reward() -> None:
    """Judge what the actors send."""
    model = language_model(1).eval()
    ids = torch.empty(BATCH, LENGTH, dtype=torch.long)
    for _ in range(ITERATIONS):
        judged = []
        for actor in ACTORS:
            dist.recv(ids, actor)
            with torch.no_grad():
                judged.append(model(ids)[:, -1, 0])
            dist.send(judged[-1].contiguous(), actor)
        dist.send(torch.stack(judged), CRITIC)


def criticise() -> None:
    """Value what the actors send, and train on the rewards."""
    model = language_model(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(ITERATIONS):
        received = []
        for actor in ACTORS:
            ids = torch.empty(BATCH, LENGTH, dtype=torch.long)
            dist.recv(ids, actor)
            with torch.no_grad():
                dist.send(model(ids)[:, -1, 0].contiguous(), actor)
            received.append(ids)
        rewards = torch.empty(len(ACTORS), BATCH)
        dist.recv(rewards, REWARD)
        loss = nn.functional.mse_loss(model(torch.cat(received))[:, -1, 0], rewards.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    """Take the role of this rank."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    actors = dist.new_group(list(ACTORS), group_desc="actors")
    if dist.get_rank() in ACTORS:
        act(actors)
    elif dist.get_rank() == REWARD:
        reward()
    else:
        criticise()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
