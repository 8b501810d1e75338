"""Every kind of layout of the trainer, recorded, its ranks on one device: whether it trains, what dtprof knows."""

import json
import time

from benchmarks.gpu.figures import Figure, emit
from benchmarks.gpu.placement import recorded, rehearsed, run_job, scratch, trainer
from dtprof.analysis.run_summary import summarise
from dtprof.records.reader import open_run

STEPS = 8
COMMON = ("--preset", "small", "--precision", "bf16", "--batch-size", "32")
LAYOUTS: tuple[tuple[int, str], ...] = (
    (2, "--dp 2"),
    (2, "--dp 2 --compile"),
    (2, "--dp-mode zero1"),
    (2, "--dp-mode fsdp --zero-stage 2"),
    (2, "--dp-mode fsdp"),
    (2, "--dp-mode fsdp --compile"),
    (2, "--tp 2"),
    (2, "--tp 2 --sequence-parallel"),
    (2, "--cp 2"),
    (2, "--cp 2 --cp-attention ring"),
    (2, "--dp 2 --offload both"),
    (2, "--dp-mode fsdp --offload optimizer"),
    (2, "--pp 2 --schedule 1f1b"),
    (2, "--pp 2 --schedule zbv"),
    (2, "--model bart --pp 2 --schedule interleaved1f1b"),
    (4, "--dp-mode hsdp --dp-replicas 2"),
    (4, "--dp-mode fsdp --tp 2"),
    (4, "--dp 2 --pp 2 --schedule dualpipev"),
    (4, "--cp 2 --tp 2 --sequence-parallel"),
)
REHEARSAL = tuple(one for one in LAYOUTS if one[1] in ("--dp 2", "--dp 2 --offload both", "--pp 2 --schedule 1f1b"))


def main() -> None:
    """Run each layout; one that fails does not keep the others from running."""
    failed = []
    for num_ranks, layout in REHEARSAL if rehearsed() else LAYOUTS:
        began_s = time.monotonic()
        try:
            run_layout(num_ranks, layout)
        except RuntimeError as error:
            failed.append(layout)
            emit(Figure(name=f"{layout}: trains", value=0, unit="", met=False, note=str(error)[-800:]))
        print(f"{layout} took {time.monotonic() - began_s:.1f} s")
    if failed:
        raise RuntimeError(f"did not train: {'; '.join(failed)}")


def run_layout(num_ranks: int, layout: str) -> None:
    """Train and record one layout, and print what came out."""
    with scratch() as folder:
        metrics = folder / "metrics.jsonl"
        arguments = (*COMMON, "--steps", str(STEPS), "--metrics", str(metrics), *layout.split())
        run_job(recorded(folder / "run", trainer(num_ranks, *arguments)), timeout_s=100)
        losses = [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]
        summary = summarise(open_run(folder / "run"))
    emit(Figure(name=f"{layout}: trains", value=1, unit="", goal="the loss falls", met=losses[-1] < losses[0],
                note=f"loss {losses[0]:.3f} to {losses[-1]:.3f}"))  # fmt: skip
    known = [rank for rank in summary.ranks if rank.partition_ns is not None]
    note = "; ".join(summary.cannot_tell)[:600]
    emit(Figure(name=f"{layout}: ranks with a partition", value=len(known), unit=f"of {num_ranks}", note=note))
    for part in ("exposed_transfer", "exposed_wait", "compute", "host"):
        values = [rank.partition_ns[part] for rank in known if rank.partition_ns is not None]
        times = [value / 1e6 for value in values if value is not None]
        if times:
            emit(Figure(name=f"{layout}: {part} a step", value=sum(times) / len(times), unit="ms", count=len(times)))


if __name__ == "__main__":
    main()
