"""What the parts of the trainer owe each other: data, the trained model, and checkpoints meet only here."""

from dataclasses import dataclass
from typing import TypedDict

from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import NotRequired

# A target that counts for nothing: padding, or a row that fills up a batch.
IGNORED_TARGET = -100


class Batch(TypedDict):
    """Hold all sequences of one step of one data-parallel rank, on the CPU; B rows, L = `--sequence-length` columns.

    The trainer cuts the rows into microbatches and the columns over `--cp`. All ranks of one data-parallel index
    (other tp, cp, pp) get the same rows. Rows may differ between data-parallel ranks (a short last batch): the loss is
    the sum over all targets that are not IGNORED_TARGET, divided by their number over all ranks.
    """

    inputs: Tensor  # (B, L) int64; BART: the targets, moved right by one, behind the begin token
    targets: Tensor  # (B, L) int64
    encoder_inputs: NotRequired[Tensor]  # BART: (B, L) int64, noised, cut and padded to L
    encoder_mask: NotRequired[Tensor]  # BART: (B, L) bool, true where encoder_inputs is no padding; at least one a row


@dataclass(frozen=True, kw_only=True)
class Part:
    """One pipeline stage on this rank (the whole model without a pipeline) and its optimizer.

    Names of parameters are those of the undivided model, in whatever stage they are; sharded parameters are DTensors.
    So `torch.distributed.checkpoint.state_dict` of all parts together, in flat form, does not depend on the layout. The
    tied embedding of BART exists in several stages under one name, with one content.
    """

    module: nn.Module
    optimizer: Optimizer
