"""What the parts of the trainer owe each other: data, the trained model, and checkpoints meet only here."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer

# A target that counts for nothing: padding, or a row that fills up a batch.
IGNORED_TARGET = -100


class Batch(TypedDict):
    """Hold all sequences of one step of one data-parallel rank, on the CPU; B rows, L = `--sequence-length` columns.

    The trainer cuts the rows into micro-batches and the columns over `--cp`. All ranks of one data-parallel index
    (other tp, cp, pp) get the same rows. Rows may differ between data-parallel ranks (a short last batch): the loss is
    the sum over all targets that are not IGNORED_TARGET, divided by their number over all ranks.
    """

    inputs: Tensor  # (B, L) int64; BART: the targets, moved right by one, behind the begin token
    targets: Tensor  # (B, L) int64
    encoder_inputs: NotRequired[Tensor]  # BART: (B, L) int64, noised, cut and padded to L
    encoder_mask: NotRequired[Tensor]  # BART: (B, L) bool, true where encoder_inputs is no padding; at least one a row


class BatchSource(Protocol):
    """Yield batches without end; the state counts what has been yielded, not what has been read ahead.

    Its state is the same on all ranks and independent of the layout: it is loaded again with other numbers of ranks.
    """

    def __iter__(self) -> Iterator[Batch]:
        """Return itself."""

    def __next__(self) -> Batch:
        """Return the rows of this data-parallel rank at the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the position."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue behind a position."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One pipeline stage on this rank (the whole model without a pipeline) and its optimizer.

    Names of parameters are those of the undivided model, in whatever stage they are; sharded parameters are DTensors.
    So `torch.distributed.checkpoint.state_dict` of all parts together, in flat form, does not depend on the layout. The
    tied embedding of BART exists in several stages under one name, with one content.
    """

    module: nn.Module
    optimizer: Optimizer


class Trained(Protocol):
    """What a checkpoint saves and loads besides the step and the position in the data."""

    parts: Sequence[Part]
