"""Losses and gradient norms of the trainer with and without recording: bit for bit the same.

Kernels that add up in an order of their own make two bare runs differ; then this comparison is inconclusive.
"""

import json
from pathlib import Path

from benchmarks.gpu.figures import Figure, emit
from benchmarks.gpu.placement import recorded, rehearsed, run_job, scratch, trainer

STEPS = 12
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
LAYOUTS = (
    ("one rank", 1, ()),
    ("2 ranks, DDP", 2, ()),
    ("2 ranks, FSDP", 2, ("--dp-mode", "fsdp")),
)


def main() -> None:
    """Compare a bare run with another and with a recorded one, for each layout."""
    for name, num_ranks, layout in LAYOUTS[:1] if rehearsed() else LAYOUTS:
        with scratch() as folder:
            runs = [train(folder, kind, num_ranks, *layout) for kind in ("bare", "again", "recorded")]
        bare, again, with_dtprof = runs
        same = sum(a == b for a, b in zip(bare, with_dtprof, strict=True))
        tells = bare == again
        emit(
            Figure(
                name=f"steps with equal loss and norm, {name}",
                value=same if tells else None,
                unit=f"of {len(bare)}",
                goal="all",
                met=same == len(bare) if tells else None,
                note="" if tells else f"cannot tell: two bare runs differ as well ({same} of {len(bare)} were equal)",
            )
        )


def train(folder: Path, kind: str, num_ranks: int, *layout: str) -> list[tuple[float, float]]:
    """Return loss and gradient norm of each step."""
    metrics = folder / f"{kind}.jsonl"
    precision = () if rehearsed() else ("--precision", "bf16")
    preset = ("--preset", "tiny" if rehearsed() else "small")
    command = trainer(num_ranks, *preset, *precision, "--steps", str(STEPS), "--metrics", str(metrics), *layout)
    if kind == "recorded":
        command = recorded(folder / "run", command)
    run_job(command, environment=DETERMINISTIC, timeout_s=90)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [(line["loss"], line["grad_norm"]) for line in lines]


if __name__ == "__main__":
    main()
