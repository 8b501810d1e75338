"""The layouts that have to train alike, and how close each has to be; free of torch."""

from dataclasses import dataclass

MODELS = ("gpt", "bart")


@dataclass(frozen=True, kw_only=True)
class ParityLayout:
    """Name a layout by its options; `both` are given to the single process as well."""

    num_ranks: int
    arguments: str
    both: str = ""
    bound: float = 1e-5
    grad_norm_bound: float = 1e-5
    covering: bool = False


def _exact(num_ranks: int, arguments: str, *, covering: bool = False) -> ParityLayout:
    return ParityLayout(num_ranks=num_ranks, arguments=arguments, covering=covering)


def _rounded(
    num_ranks: int, arguments: str, *, bound: float, grad_norm_bound: float, covering: bool = False
) -> ParityLayout:
    return ParityLayout(
        num_ranks=num_ranks, arguments=arguments, bound=bound, grad_norm_bound=grad_norm_bound, covering=covering
    )


SINGLE = ParityLayout(num_ranks=1, arguments="")

LAYOUTS = [
    # Data parallelism
    _exact(1, "--accumulate 4", covering=True),
    _exact(2, "--dp 2"),
    _exact(2, "--dp 2 --bucket-mb 0.01 --static-graph"),
    _exact(2, "--dp 2 --bucket-mb 0.01 --accumulate 2", covering=True),
    _exact(4, "--dp 4 --find-unused-parameters"),
    _exact(8, "--dp 8"),
    _exact(4, "--dp-mode zero1", covering=True),
    _exact(4, "--dp-mode fsdp --zero-stage 2 --accumulate 2"),
    _exact(4, "--dp-mode fsdp --zero-stage 3", covering=True),
    _exact(8, "--dp-mode fsdp"),
    _exact(4, "--dp-mode hsdp --dp-replicas 2", covering=True),
    _exact(8, "--dp-mode hsdp --zero-stage 2 --dp-replicas 2"),
    # Tensor and sequence parallelism
    _exact(2, "--tp 2"),
    _exact(4, "--tp 4"),
    _exact(2, "--tp 2 --sequence-parallel"),
    _exact(4, "--tp 2 --sequence-parallel --dp 2 --accumulate 2", covering=True),
    _exact(4, "--tp 2 --dp-mode fsdp", covering=True),
    _exact(8, "--tp 2 --dp-mode hsdp --sequence-parallel"),
    # Context parallelism
    _exact(2, "--cp 2"),
    _exact(4, "--cp 4"),
    _exact(4, "--cp 2 --dp 2 --accumulate 2"),
    _exact(4, "--cp 2 --dp-mode fsdp"),
    _exact(4, "--cp 2 --dp-mode zero1"),
    _exact(4, "--cp 2 --tp 2 --sequence-parallel", covering=True),
    _exact(2, "--cp 2 --cp-attention ring"),
    _exact(4, "--cp 4 --cp-attention ring", covering=True),
    _exact(4, "--cp 2 --cp-attention ring --dp-mode fsdp"),
    _exact(4, "--cp 2 --cp-attention ring --tp 2 --sequence-parallel"),
    _exact(4, "--cp 2 --cp-attention ring --pp 2 --schedule 1f1b"),
    # Pipelines
    _exact(2, "--pp 2 --schedule gpipe"),
    _exact(4, "--pp 4 --schedule gpipe", covering=True),
    _exact(2, "--pp 2 --schedule 1f1b"),
    _exact(4, "--pp 4 --schedule 1f1b --microbatches 8"),
    _exact(4, "--pp 4 --schedule 1f1b --pp-split 3,1,2,2"),
    _exact(4, "--pp 4 --schedule 1f1b --pp-split balanced"),
    _exact(2, "--pp 2 --schedule interleaved1f1b"),
    _exact(4, "--pp 4 --schedule interleaved1f1b --microbatches 8"),
    _exact(2, "--pp 2 --schedule interleaved1f1b --stages-per-rank 3 --microbatches 4"),
    _exact(2, "--pp 2 --schedule zero-bubble"),
    _exact(4, "--pp 4 --schedule zero-bubble --microbatches 8"),
    _exact(2, "--pp 2 --schedule zbv"),
    _exact(4, "--pp 4 --schedule zbv --microbatches 8", covering=True),
    _exact(2, "--pp 2 --schedule dualpipev"),
    _exact(4, "--pp 4 --schedule dualpipev --microbatches 8"),
    # Two, three and four kinds at once
    _exact(4, "--pp 2 --dp 2 --schedule 1f1b", covering=True),
    _exact(4, "--pp 2 --dp 2 --schedule zbv"),
    _exact(4, "--pp 2 --dp-mode fsdp --schedule gpipe"),
    _exact(4, "--pp 2 --dp-mode fsdp --schedule interleaved1f1b"),
    _exact(4, "--pp 2 --dp-mode fsdp --zero-stage 2 --schedule zero-bubble"),
    _exact(4, "--pp 2 --dp-mode fsdp --schedule dualpipev", covering=True),
    _exact(4, "--pp 2 --tp 2 --schedule 1f1b"),
    _exact(4, "--pp 2 --tp 2 --schedule zero-bubble"),
    _exact(4, "--pp 2 --tp 2 --sequence-parallel --schedule zbv", covering=True),
    _exact(4, "--pp 2 --cp 2 --schedule 1f1b"),
    _exact(4, "--pp 2 --cp 2 --schedule dualpipev"),
    _exact(8, "--dp 2 --tp 2 --pp 2 --schedule 1f1b"),
    _exact(8, "--dp 2 --dp-mode fsdp --tp 2 --pp 2 --schedule interleaved1f1b --sequence-parallel"),
    _exact(8, "--dp 2 --dp-mode fsdp --tp 2 --pp 2 --schedule zero-bubble"),
    _exact(8, "--dp 2 --tp 2 --pp 2 --schedule zbv"),
    _exact(8, "--dp 2 --dp-mode fsdp --tp 2 --cp 2 --sequence-parallel"),
    _exact(8, "--dp 2 --cp 2 --pp 2 --dp-mode fsdp --schedule 1f1b"),
    _exact(8, "--cp 2 --tp 2 --pp 2 --sequence-parallel --schedule zbv"),
    _exact(8, "--dp-mode hsdp --dp 4 --pp 2 --schedule 1f1b"),
    _exact(16, "--dp 2 --tp 2 --pp 2 --cp 2 --schedule 1f1b"),
    # Recomputation changes nothing
    _exact(1, "--activation-checkpointing full"),
    _exact(2, "--activation-checkpointing selective --dp-mode fsdp", covering=True),
    _exact(4, "--activation-checkpointing full --pp 2 --schedule 1f1b --tp 2"),
    _exact(4, "--activation-checkpointing full --cp 2 --tp 2 --sequence-parallel"),
    _exact(2, "--activation-checkpointing selective --tp 2 --sequence-parallel"),
    # Nor does the place where numbers lie
    _exact(1, "--offload both"),
    _exact(2, "--offload both --dp 2", covering=True),
    _exact(2, "--offload both --dp-mode zero1"),
    _exact(2, "--offload both --dp-mode fsdp"),
    _exact(4, "--offload both --tp 2 --dp-mode fsdp --sequence-parallel"),
    _exact(2, "--offload both --pp 2 --schedule zbv"),
    # A gradient in fp16 is off by up to 2**-11 = 4.9e-4 of itself. A step moves the loss by some hundredths of itself,
    # of which this is a part; Adam's first steps, which look at signs, carry it to single small gradients.
    _rounded(2, "--compression fp16", bound=1e-4, grad_norm_bound=2e-2, covering=True),
    # Of each matrix only rank 4 of up to 64 arrives at once; what is left over arrives later, by error feedback.
    _rounded(2, "--compression powersgd", bound=1e-2, grad_norm_bound=0.5, covering=True),
    # Between two averages each rank follows its own half of the batch: after some steps it is somewhere else. The
    # norm is that of rank 0's own gradient.
    _rounded(2, "--local-sgd 4", bound=5e-2, grad_norm_bound=1.0, covering=True),
    # fp32 rounds to 2**-24 = 6e-8 of each number, over some hundred sums.
    _rounded(2, "--precision fp32 --dp-mode fsdp", bound=1e-5, grad_norm_bound=1e-4),
    # bf16 rounds each activation to 2**-9 = 2e-3 of itself; the mean over all tokens is off by less. The norm of the
    # gradient falls by a factor of ten in these steps, and what it is off by does not.
    _rounded(2, "--precision bf16", bound=2e-3, grad_norm_bound=0.5),
    _rounded(2, "--precision bf16 --dp-mode fsdp", bound=2e-3, grad_norm_bound=0.5, covering=True),
    _rounded(2, "--precision bf16 --tp 2 --sequence-parallel", bound=2e-3, grad_norm_bound=0.5),
    _rounded(2, "--precision bf16 --pp 2 --schedule zbv", bound=2e-3, grad_norm_bound=0.5),
    _rounded(4, "--precision bf16 --cp 2", bound=2e-3, grad_norm_bound=0.5),
    _rounded(2, "--precision bf16 --cp 2 --cp-attention ring", bound=2e-3, grad_norm_bound=0.5),
    # Last, since it takes minutes. Compiled kernels sum in another order
    _exact(1, "--compile"),
    _exact(2, "--compile --dp-mode fsdp"),
]
