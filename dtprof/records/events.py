"""Names of operations, phases and samples, the same everywhere in dtprof."""

COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "all_to_all",
    "barrier",
)
POINT_TO_POINT = ("send", "recv")
FROM_ROOT = ("broadcast", "scatter")
TO_ROOT = ("reduce", "gather")
FROM_ALL = ("all_reduce", "all_gather", "reduce_scatter", "barrier")
"""No member has its result before the last member has entered the operation."""

_CANONICAL = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_coalesced_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "barrier": "barrier",
    "monitored_barrier_": "barrier",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "gather_": "gather",
    "gather_into_tensor_": "gather",
    "scatter_": "scatter",
    "send": "send",
    "recv_": "recv",
    "recv_any_source_": "recv",
}

DATA = "data"
FORWARD = "forward"
BACKWARD = "backward"
OPTIMIZER = "optimizer"
CHECKPOINT = "checkpoint"
RECOMPUTE = "recompute"  # of activations, inside a backward pass
EVALUATION = "evaluation"  # a forward pass that no backward pass will follow
COMPILE = "compile"
GARBAGE_COLLECTION = "garbage_collection"
INIT = "init_process_group"
NEW_GROUP = "new_group"  # and split_group
PHASES = (
    DATA,
    FORWARD,
    RECOMPUTE,
    BACKWARD,
    OPTIMIZER,
    CHECKPOINT,
    EVALUATION,
    COMPILE,
    GARBAGE_COLLECTION,
)
DEVICE_BUSY = "device_busy"  # of imported runs: the device computes; what it did besides communication is idle
DEVICE_MARKS_SKIPPED = "device_marks_skipped"  # so many found no place so far
DEVICE_MARKS_CAPTURED = "device_marks_captured"  # so many fell into the capture of a graph so far
GRAPH_REPLAY = "graph_replay"  # a CUDA graph runs; operations in it do not pass the dispatcher
HOST_BOUND = "host_bound"  # on a device: the host had not given it work; found by job/device_timeline.py
HOST_BUSY = "host_busy"  # of imported runs: an operator computes on the host
OUTSIDE_GROUP = "outside_group"  # a collective of a group that the rank is no member of: torch only warns of it
LEAVING = "leaving"  # a span without length: the program called sys.exit or os._exit
STEP = "step"  # a span without length: the program called dtprof.step()
USER_PHASE = "phase:"
"""Begins the names of spans that the program opened with dtprof.phase(), unless it named one of PHASES."""

PP_STEP = "pp_step"  # a step of a pipeline schedule on one rank; its microbatch is the id of the `pipeline` entry
PP_EVALUATION = "pp_evaluation"  # the same without backward passes
PP_FORWARD = "pp_forward"
PP_LOSS = "pp_loss"  # follows the forward of the last stage
PP_BACKWARD = "pp_backward"  # gradients of inputs and weights
PP_BACKWARD_INPUT = "pp_backward_input"
PP_BACKWARD_WEIGHT = "pp_backward_weight"
PP_REDUCE_GRAD = "pp_reduce_grad"
PIPELINE_FORWARD = (PP_FORWARD, PP_LOSS)
PIPELINE_BACKWARD = (PP_BACKWARD, PP_BACKWARD_INPUT, PP_BACKWARD_WEIGHT, PP_REDUCE_GRAD)
PIPELINE_KINDS = {
    "F": PP_FORWARD,
    "B": PP_BACKWARD,
    "I": PP_BACKWARD_INPUT,
    "W": PP_BACKWARD_WEIGHT,
    "REDUCE_GRAD": PP_REDUCE_GRAD,
}
"""Actions by their names in torch's plans of a schedule."""

TOKENS = "step_tokens"  # that this rank consumes a step, from the step on in which it is sampled
SAMPLES = "step_samples"
CONSUMED = (TOKENS, SAMPLES)
SEQUENCE_FIRST = "layers:sequence_first"
"""Feature of a job whose models have layers of torch.nn that may take the sequence before the batch."""
PACKED = "inputs:packed"
"""Feature of a job whose models take several sequences in one row of token ids."""
RSS_BYTES = "rss_bytes"
PEAK_RSS_BYTES = "peak_rss_bytes"
CUDA_ALLOCATED_BYTES = "cuda_allocated_bytes"
CUDA_RESERVED_BYTES = "cuda_reserved_bytes"
CUDA_PEAK_ALLOCATED_BYTES = "cuda_peak_allocated_bytes"
CUDA_PEAK_RESERVED_BYTES = "cuda_peak_reserved_bytes"
CUDA_INACTIVE_SPLIT_BYTES = "cuda_inactive_split_bytes"
CUDA_OUT_OF_MEMORY = "cuda_out_of_memory"  # how often the allocator ran out, counted from the start
USS_BYTES = "uss_bytes"
HEAP_BYTES = "heap_bytes"  # in use on the C library's heap: tensors on the CPU, and all other objects of C and Python
MEMORY_CATEGORIES = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer_state": "optimizer_state_bytes",
    "activations": "activation_bytes",
    "communication": "communication_bytes",
}
"""Samples of memory by category."""
MEMORY_LABELS = {
    RSS_BYTES: "process RSS",
    PEAK_RSS_BYTES: "process RSS, peak",
    USS_BYTES: "process USS",
    HEAP_BYTES: "C heap",
    CUDA_ALLOCATED_BYTES: "allocated",
    CUDA_PEAK_ALLOCATED_BYTES: "allocated, peak",
    CUDA_RESERVED_BYTES: "reserved",
    CUDA_PEAK_RESERVED_BYTES: "reserved, peak",
    CUDA_INACTIVE_SPLIT_BYTES: "reserved, split and unused",
} | {sample: category.replace("_", " ") for category, sample in MEMORY_CATEGORIES.items()}
"""Samples of memory, for people: those of the device's allocator in the allocator's own terms."""


def memory_label(sample: str) -> str:
    """Return the name of a sample of memory for people; one that is not known keeps its own, without the unit."""
    return MEMORY_LABELS.get(sample, sample.removesuffix("_bytes").replace("_", " "))


def canonical_op(c10d_name: str) -> str:
    """Return the common name of an operator of torch's `c10d` namespace.

    An operator that a newer torch adds keeps its own name without the underscores; a phase of the user's keeps them.
    """
    return _CANONICAL.get(c10d_name, c10d_name if c10d_name.startswith(USER_PHASE) else c10d_name.strip("_"))
