"""Durations of operations as recorded against those of their kernels in torch.profiler's traces of the same run.

The trainer on 2 ranks takes a window of the profiler; dtprof joins the kernels of NCCL with its records. A recorded
duration counts as right within 2 % or 2 us of the kernel's. The events lie around the kernel: it is a bit more.
"""

import statistics

import torch

import dtprof
from benchmarks.gpu.figures import Figure, emit
from benchmarks.gpu.placement import recorded, rehearsed, run_job, scratch, trainer

NUM_RANKS = 2
STEPS, WINDOW = 16, "6:13"
SHARE, LEAST_NS = 0.02, 2_000
EMPTY_PAIRS = 200
TURN_NS = 1_000_000
"""Less than a turn of a process on a device that several share: 2.4 ms on an H100."""


def main() -> None:
    """Print how many kernels were matched, and how far durations are apart."""
    if not rehearsed():
        emit_empty_pairs()
    with scratch() as folder:
        arguments = ["--preset", "tiny", "--steps", str(STEPS), "--bucket-mb", "0.5"]
        run_job(recorded(folder / "run", trainer(NUM_RANKS, *arguments), "--trace-steps", WINDOW))
        rows = list(dtprof.open_run(folder / "run").table("traced_operations"))
    kernels = [row for row in rows if row["on_device"] or rehearsed()]
    matched = [row for row in kernels if row["seq"] is not None]
    share = 100 * len(matched) / len(kernels) if kernels else None
    emit(
        Figure(
            name="kernels of NCCL matched with records",
            value=share,
            unit="%",
            count=len(kernels),
            goal="at least 99 %",
            met=share is not None and share >= 99,
        )
    )
    known = [row for row in matched if row["recorded_ns"] is not None and row["traced_end_ns"] is not None]
    pairs = [(row["recorded_ns"], row["traced_end_ns"] - row["traced_begin_ns"]) for row in known]
    right = [abs(ours - theirs) <= max(SHARE * theirs, LEAST_NS) for ours, theirs in pairs]
    emit(
        Figure(
            name="durations within 2 % or 2 us of the profiler's",
            value=100 * sum(right) / len(right) if right else None,
            unit="%",
            count=len(pairs),
            goal="all",
            met=bool(right) and all(right),
            note=f"{len(matched) - len(known)} of {len(matched)} matched without a recorded duration",
        )
    )
    turns = sum(ours - theirs > TURN_NS for ours, theirs in pairs)
    note = "as where the other process has its turn on the device between kernel and event"
    emit(Figure(name="durations more than 1 ms too long", value=turns, unit=f"of {len(pairs)}", note=note))
    for name in sorted({row["op"] for row in known}):
        chosen = [pair for row, pair in zip(known, pairs, strict=True) if row["op"] == name]
        kernel_us = statistics.median(theirs for _, theirs in chosen) / 1000
        apart = sorted((ours - theirs) / 1000 for ours, theirs in chosen)
        emit(
            Figure(
                name=f"{name}: recorded less kernel, median",
                value=statistics.median(apart),
                unit="us",
                count=len(apart),
                note=f"{apart[0]:.2f} to {apart[-1]:.2f} us; kernels of {kernel_us:.1f} us",
            )
        )


def emit_empty_pairs() -> None:
    """Print what two events read that have nothing between them: recorded durations are too long by at least that."""
    pairs = [[torch.Event("cuda", enable_timing=True) for _ in range(2)] for _ in range(EMPTY_PAIRS)]
    torch.cuda._sleep(10_000_000)  # type: ignore[no-untyped-call]  # the host gets ahead, as it is in training
    for begin, end in pairs:
        begin.record()
        end.record()
    torch.cuda.synchronize()
    read_us = sorted(begin.elapsed_time(end) * 1000 for begin, end in pairs)
    emit(
        Figure(
            name="two events with nothing between them, median",
            value=statistics.median(read_us),
            unit="us",
            count=len(read_us),
            note=f"{read_us[0]:.2f} to {read_us[-1]:.2f} us",
        )
    )


if __name__ == "__main__":
    main()
