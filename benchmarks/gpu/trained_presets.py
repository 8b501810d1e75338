"""The presets for GPUs on one rank, in bf16, compiled: tokens a second, model FLOPs utilisation, and the loss."""

import json
import statistics
import time
from pathlib import Path

from benchmarks.gpu.figures import Figure, emit
from benchmarks.gpu.placement import rehearsed, run_job, scratch, trainer

STEPS, WARM_UP = 24, 10
BYTES = ("--tokenizer", "bytes")  # byte pairs would be learned from the corpus first, for minutes
# The time of a part may end before the last ones.
RUNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("gpu", ("--preset", "gpu", "--compile")),
    ("1b", ("--preset", "1b", "--batch-size", "8", "--compile", *BYTES)),
    ("bart-large", ("--preset", "bart-large", "--batch-size", "32", "--compile", *BYTES)),
    ("gpu, not compiled", ("--preset", "gpu")),
    ("1b, layers recomputed", ("--preset", "1b", "--batch-size", "32", "--activation-checkpointing", "full", *BYTES)),
    ("1b, offloaded", ("--preset", "1b", "--batch-size", "8", "--offload", "both", *BYTES)),
    ("gpu, BART", ("--preset", "gpu", "--model", "bart", "--compile")),
)
REHEARSAL = (("tiny", ("--preset", "tiny", "--precision", "bf16")),)


def main() -> None:
    """Print the figures of each preset; one that fails does not keep the others from running."""
    failed = []
    for name, arguments in REHEARSAL if rehearsed() else RUNS:
        began_s = time.monotonic()
        try:
            lines = train(1, *arguments, steps=STEPS)
        except RuntimeError as error:
            failed.append(name)
            emit(Figure(name=f"{name}: trains", value=0, unit="", met=False, note=str(error)[-800:]))
            continue
        report(name, lines, took_s=time.monotonic() - began_s)
    if failed:
        raise RuntimeError(f"did not train: {', '.join(failed)}")


def train(num_ranks: int, *arguments: str, steps: int) -> list[dict[str, float]]:
    """Return the metrics of each step."""
    with scratch() as folder:
        metrics = Path(folder, "metrics.jsonl")
        options = ("--steps", str(steps), "--metrics", str(metrics), "--mfu")
        run_job(trainer(num_ranks, *arguments, *options), timeout_s=150)
        return [json.loads(line) for line in metrics.read_text().splitlines()]


def report(name: str, lines: list[dict[str, float]], *, took_s: float) -> None:
    """Print what a run came to."""
    steady = lines[min(WARM_UP, len(lines) // 2) :]
    first, last = lines[0]["loss"], lines[-1]["loss"]
    emit(Figure(name=f"{name}: trains", value=1, unit="", met=last < first, goal="the loss falls",
                note=f"loss {first:.3f} to {last:.3f} in {len(lines)} steps; {took_s:.0f} s in all"))  # fmt: skip
    for key, unit, scale in (("tokens_per_s", "tokens/s", 1), ("mfu", "%", 100)):
        values = [scale * line[key] for line in steady]
        emit(Figure(name=f"{name}: {key}", value=statistics.median(values), unit=unit, count=len(values),
                    note=f"{min(values):.4g} to {max(values):.4g}"))  # fmt: skip


if __name__ == "__main__":
    main()
