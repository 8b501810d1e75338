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


SINGLE = ParityLayout(num_ranks=1, arguments="")

LAYOUTS = [
    # Data parallelism
    _exact(1, "--accumulate 4"),
    _exact(2, "--dp 2"),
    _exact(2, "--dp 2 --bucket-mb 0.01 --static-graph"),
    _exact(2, "--dp 2 --bucket-mb 0.01 --accumulate 2"),
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
    _exact(4, "--tp 2 --dp-mode fsdp"),
    _exact(8, "--tp 2 --dp-mode hsdp --sequence-parallel"),
    # Context parallelism
    _exact(2, "--cp 2"),
    _exact(4, "--cp 4"),
    _exact(4, "--cp 2 --dp 2 --accumulate 2"),
    _exact(4, "--cp 2 --dp-mode fsdp"),
    _exact(4, "--cp 2 --dp-mode zero1"),
    _exact(4, "--cp 2 --tp 2 --sequence-parallel", covering=True),
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
    # Recomputation changes nothing
    _exact(1, "--activation-checkpointing full"),
    _exact(2, "--activation-checkpointing selective --dp-mode fsdp", covering=True),
    _exact(4, "--activation-checkpointing full --pp 2 --schedule 1f1b --tp 2"),
    _exact(4, "--activation-checkpointing full --cp 2 --tp 2 --sequence-parallel"),
    _exact(2, "--activation-checkpointing selective --tp 2 --sequence-parallel"),
]
