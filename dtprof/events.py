"""The vocabulary of events: what operations and phases are called everywhere in dtprof."""

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
INIT = "init_process_group"
PHASES = (DATA, FORWARD, BACKWARD, OPTIMIZER, CHECKPOINT)

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
"""What torch's plans of a schedule call the actions."""

RSS_BYTES = "rss_bytes"
PEAK_RSS_BYTES = "peak_rss_bytes"
CUDA_ALLOCATED_BYTES = "cuda_allocated_bytes"
CUDA_RESERVED_BYTES = "cuda_reserved_bytes"
CUDA_PEAK_ALLOCATED_BYTES = "cuda_peak_allocated_bytes"


def canonical_op(c10d_name: str) -> str:
    """Return the common name of an operator of torch's `c10d` namespace.

    An operator that a newer torch adds keeps its own name without the underscores.
    """
    return _CANONICAL.get(c10d_name, c10d_name.strip("_"))
