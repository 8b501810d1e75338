"""Every metric of a running job: name, kind, labels, meaning. docs/reference/prometheus.md is written from this table.

Names follow Prometheus' conventions: base units (seconds, bytes) end the name, totals end with `_total`. Labels are
bounded: ranks by MAX_RANKS of a node, groups, operations and phases by MAX_NAMES.
"""

from dtprof.interchange.metric_families import COUNTER, GAUGE, HISTOGRAM, DeclaredMetric

MAX_RANKS = 32
"""Ranks of a node that have series of their own: all where there are no more, else those most waited for."""
MAX_NAMES = 24
"""Groups, operations and phases with a label of their own, of each kind; later ones are counted under OTHER."""
OTHER = "other"


def _metric(name: str, kind: str, text: str, *labels: str) -> DeclaredMetric:
    return DeclaredMetric(name=f"dtprof_{name}", kind=kind, help=text, labels=labels)


RUN_INFO = _metric("run_info", GAUGE, "1; which run this is.", "run", "host", "version", "torch")
RANKS = _metric("ranks", GAUGE, "Ranks of this node that have left a record.")
WORLD_SIZE = _metric("world_size", GAUGE, "Ranks of the job.")
HANG = _metric("hang", GAUGE, "1 while the job is stalled, as dtprof diagnose finds; else 0.")
LAST_PROGRESS = _metric(
    "last_progress_timestamp_seconds", GAUGE, "When a rank of this node last recorded anything, in Unix time."
)
OLDEST_OPEN = _metric(
    "oldest_open_operation_seconds", GAUGE, "Age of the oldest operation that has not ended on a rank of this node."
)
OPEN = _metric("open_operations", GAUGE, "Operations of ranks of this node that have not ended.", "group", "op")

STEP_DURATION = _metric(
    "step_duration_seconds", HISTOGRAM, "Duration of steps, each rank of this node counted by itself."
)
PHASE = _metric("phase_seconds_total", COUNTER, "Time in phases of the step, summed over ranks of this node.", "phase")

TOKENS = _metric(
    "tokens_total", COUNTER, "Tokens consumed; ranks that share them count once, on the node of the lowest of them."
)
SAMPLES = _metric("samples_total", COUNTER, "Samples that batches consumed had, counted in the same way.")

OPERATIONS = _metric("operations_total", COUNTER, "Operations that have ended, each rank by itself.", "group", "op")
BYTES = _metric("operation_bytes_total", COUNTER, "Bytes that ranks put into operations.", "group", "op")
FAILED = _metric("operations_failed_total", COUNTER, "Operations that failed.", "group", "op")
DURATION = _metric(
    "operation_duration_seconds_total",
    COUNTER,
    "From issue to completion, of operations seen to complete, summed over ranks of this node.",
    "group",
    "op",
)
BLOCKED = _metric(
    "operation_blocked_seconds_total",
    COUNTER,
    "Time in which operations kept the program from going on, summed over ranks of this node.",
    "group",
    "op",
)
WAIT = _metric(
    "operation_wait_seconds_total",
    COUNTER,
    "Of the duration, time until the last member on this node arrived, summed over ranks of this node.",
    "group",
    "op",
)

RANK_STEPS = _metric("rank_steps_total", COUNTER, "Steps that the rank has ended.", "rank")
RANK_STEP = _metric("rank_step_seconds_total", COUNTER, "Duration of its steps.", "rank")
RANK_BLOCKED = _metric(
    "rank_blocked_seconds_total", COUNTER, "Time in which operations kept the rank from going on.", "rank"
)
RANK_WAIT = _metric(
    "rank_wait_seconds_total", COUNTER, "Time it waited in collectives for later ranks of this node.", "rank"
)
RANK_WAITED_FOR = _metric(
    "rank_waited_for_seconds_total",
    COUNTER,
    "Time that other ranks of this node waited in collectives until this one arrived last.",
    "rank",
)
RANK_MEMORY = _metric("rank_memory_bytes", GAUGE, "Memory at the end of its newest step.", "rank", "kind")
MEMORY_HELD = _metric("memory_held_bytes", GAUGE, "Memory by purpose, of the rank that holds most.", "category")

EVENTS = _metric("events_total", COUNTER, "Events that ranks of this node have recorded.")
DROPPED = _metric("dropped_events_total", COUNTER, "Events whose records were dropped for want of room.")
TRUNCATED = _metric("recording_stopped", GAUGE, "1 when a rank had to stop recording (full disk); else 0.")
CAPTURE = _metric("capture_seconds_total", COUNTER, "Time dtprof spent inside ranks of this node.")
COLLECT = _metric("metrics_cpu_seconds_total", COUNTER, "Processor time spent to keep these metrics.")
MISSED = _metric("metrics_missed_events_total", COUNTER, "Events dropped before they could be counted here.")

NODE_CPU = _metric("node_cpu_seconds_total", COUNTER, "Processor time of all cores since boot.", "mode")
NODE_MEMORY = _metric("node_memory_used_bytes", GAUGE, "Memory of the node that cannot be given to a program.")
NODE_MEMORY_SIZE = _metric("node_memory_bytes", GAUGE, "Memory of the node.")
NODE_SWAP = _metric("node_swap_used_bytes", GAUGE, "Swap in use.")
OOM_KILLS = _metric("node_oom_kills_total", COUNTER, "Processes killed for want of memory since the job began.")
GPU_INFO = _metric("gpu_info", GAUGE, "1; which device this is.", "gpu", "name", "uuid")
GPU_UTILISATION = _metric("gpu_utilisation_ratio", GAUGE, "Share of time in which a kernel ran.", "gpu")
GPU_MEMORY = _metric("gpu_memory_used_bytes", GAUGE, "Device memory in use by any process.", "gpu")
GPU_MEMORY_SIZE = _metric("gpu_memory_bytes", GAUGE, "Device memory.", "gpu")
GPU_POWER = _metric("gpu_power_watts", GAUGE, "Power drawn.", "gpu")
GPU_ENERGY = _metric("gpu_energy_joules_total", COUNTER, "Energy used since the driver was loaded.", "gpu")
GPU_TEMPERATURE = _metric("gpu_temperature_celsius", GAUGE, "Temperature of the chip.", "gpu")
GPU_CLOCK = _metric("gpu_sm_clock_hertz", GAUGE, "Clock of the multiprocessors.", "gpu")
GPU_THROTTLED = _metric(
    "gpu_throttled", GAUGE, "1 while clocks are held down for this reason; else 0.", "gpu", "reason"
)
GPU_ECC = _metric("gpu_ecc_errors_total", COUNTER, "Memory errors since the driver was loaded.", "gpu", "kind")
GPU_XID = _metric("gpu_xid_errors_total", COUNTER, "Critical XID events since the job began.", "gpu")

METRICS = tuple(value for value in list(globals().values()) if isinstance(value, DeclaredMetric))
STEP_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
"""Upper bounds of the stretches of STEP_DURATION, in seconds."""
