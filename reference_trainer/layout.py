"""How a model is parallelized over ranks; free of torch."""

from dataclasses import dataclass

DP_MODES = ("ddp", "zero1", "fsdp", "hsdp", "ps")
CHECKPOINTING = ("none", "selective", "full")
ATTENTIONS = ("gather", "ring")
OFFLOADS = ("none", "optimizer", "activations", "both")
COMPRESSIONS = ("none", "fp16", "powersgd")
# Schedule, and the stages that a rank holds; None where it can be chosen.
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved1f1b": None, "zero-bubble": None, "zbv": 2, "dualpipev": 2}
SPLITTING_SCHEDULES = ("zero-bubble", "zbv", "dualpipev")  # backward in two parts: of inputs, and of weights
IN_ROUNDS = ("interleaved1f1b", "zero-bubble")
BALANCED = "balanced"


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Name the degrees of every kind of parallelism, and how each is done."""

    dp: int = 1
    dp_mode: str = "ddp"
    zero_stage: int = 3
    num_replicas: int = 1  # of hsdp
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    cp_attention: str = "gather"
    pp: int = 1
    schedule: str = "1f1b"
    microbatches: int = 1
    stages_per_rank: int = 1
    split: tuple[int, ...] | str | None = None  # layers of each stage; "balanced": measured; None: even
    accumulate: int = 1
    bucket_mb: float = 25.0
    find_unused_parameters: bool = False
    static_graph: bool = False
    compression: str = "none"
    local_sgd: int = 0
    staleness: int | None = None  # of ps; None: all workers in step
    activation_checkpointing: str = "none"
    compile: bool = False
    offload: str = "none"

    @property
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.tp * self.cp * self.pp

    @property
    def num_stages(self) -> int:
        """Return the number of pipeline stages over all ranks."""
        return self.pp * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Tell whether the schedule computes gradients of inputs and of weights at different times."""
        return self.pp > 1 and self.schedule in SPLITTING_SCHEDULES

    @property
    def offloads_optimizer(self) -> bool:
        """Tell whether the host holds and updates the state of the optimizer."""
        return self.offload in ("optimizer", "both")

    @property
    def offloads_activations(self) -> bool:
        """Tell whether activations wait for the backward pass on the host."""
        return self.offload in ("activations", "both")

    @property
    def num_data_ranks(self) -> int:
        """Return the data-parallel ranks that train: all but a parameter server."""
        return self.dp - 1 if self.dp_mode == "ps" else self.dp

    @property
    def has_plain_parameters(self) -> bool:
        """Tell whether each rank holds the whole model as ordinary tensors, as DistributedDataParallel needs it."""
        return self.tp == 1 and self.pp == 1 and self.dp_mode in ("ddp", "zero1", "ps")

    def describe(self) -> str:
        """Name what is more than data parallelism by DDP, for a person."""
        mode = f"{self.dp_mode}{self.zero_stage if self.dp_mode in ('fsdp', 'hsdp') else ''}"
        degrees = (("dp", self.dp), ("tp", self.tp), ("cp", self.cp), ("pp", self.pp))
        axes = [f"{name} {degree}" for name, degree in degrees if degree > 1]
        if self.dp > 1:
            axes[0] += f" ({mode})" if mode != "ddp" else ""
        if self.cp > 1 and self.cp_attention != "gather":
            axes = [f"{axis} ({self.cp_attention})" if axis.startswith("cp ") else axis for axis in axes]
        if self.pp > 1:
            axes[-1] += f" ({self.schedule}, {self.microbatches} microbatches)"
        return f": {', '.join(axes)}" if axes and axes != [f"dp {self.dp}"] else ""
