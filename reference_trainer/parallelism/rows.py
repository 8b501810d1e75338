"""How the rows of a batch become microbatches."""

from torch import Tensor


def split_rows(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    """Cut a batch into microbatches, of the same number of rows or one less."""
    pieces = {name: tensor.tensor_split(count) for name, tensor in batch.items()}
    return [{name: piece[index] for name, piece in pieces.items()} for index in range(count)]
