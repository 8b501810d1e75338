"""What programs/known_layouts.py injects, for the program and for those that know the truth by it."""

MS = 1_000_000
FORWARD_NS, BACKWARD_NS, OPTIMIZER_NS = 20 * MS, 40 * MS, 10 * MS
LATE_NS, SLEEP_NS = 10 * MS, 40 * MS
COSTS_NS = {
    "simccl::ALLREDUCE": 50 * MS,
    "simccl::_ALLGATHER_BASE": 30 * MS,
    "simccl::_REDUCE_SCATTER_BASE": 55 * MS,
    "simccl::SEND": 5 * MS,
    "simccl::RECV": 5 * MS,
    "simccl::COALESCED": 32 * MS,
}
