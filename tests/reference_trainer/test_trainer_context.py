import torch

from reference_trainer.parallelism.context import DividedPositions

CPU = torch.device("cpu")


def test_each_rank_has_an_early_and_a_late_piece() -> None:
    # 12 positions on 3 ranks are 6 pieces of 2.
    expected = [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert [DividedPositions(rank, 3)(4, CPU).tolist() for rank in range(3)] == expected


def test_gathered_columns_are_put_back_in_order() -> None:
    gathered = torch.tensor([0, 1, 10, 11, 2, 3, 8, 9, 4, 5, 6, 7])
    order = DividedPositions(1, 3).find_order(4, CPU)
    assert gathered[order].tolist() == list(range(12))


def test_every_rank_has_the_same_work_under_a_causal_mask() -> None:
    # A query at position p sees p + 1 keys: 26 on each rank, a third of 1 + 2 + ... + 12.
    assert {int((DividedPositions(rank, 3)(4, CPU) + 1).sum()) for rank in range(3)} == {26}
