"""Random numbers that are the same in every run, and others on every rank."""

import random

import numpy as np
import torch


def seed_rank(seed: int, rank: int) -> None:
    """Seed all generators of this process from the seed of the run and the rank.

    Weights, the order of samples and their damage come from generators of their own, the same on all ranks.
    """
    rank_seed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(rank_seed)
    np.random.seed(rank_seed)
    torch.manual_seed(rank_seed)
