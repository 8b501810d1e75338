"""What recording adds to a step of the example: the trainer of `make demo` on 4 ranks, bare and recorded in turn.

Each measurement is a whole job; its figure is the median duration of its steps after the first five. Bare against
bare, measured the same way, shows what the noise of the machine alone gives.
"""

import functools
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import pairs

PAIRS = 6
STEPS = 40
WARM_UP = 5
TRAINER = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4", "-m", "reference_trainer"]
OPTIONS = ["--preset", "tiny", "--steps", str(STEPS)]
TOKENS_PER_STEP = 24 * 160
"""Of the tiny preset: sequences times tokens."""


def measure(folder: Path, *, recorded: bool) -> float:
    """Return the median step of one job, in ms."""
    metrics = Path(tempfile.mkdtemp(dir=folder)) / "metrics.jsonl"
    command = [sys.executable, *TRAINER, *OPTIONS, "--metrics", str(metrics)]
    if recorded:
        command = [sys.executable, "-m", "dtprof", "run", "-o", str(metrics.parent / "run"), "--", *command]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return float(statistics.median(TOKENS_PER_STEP / line["tokens_per_s"] * 1000 for line in lines[WARM_UP:]))


def main() -> None:
    """Compare recorded with bare, and bare with bare."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for label, b_is_recorded in (("native tap", True), ("bare again", False)):
            bare = functools.partial(measure, folder, recorded=False)
            other = functools.partial(measure, folder, recorded=b_is_recorded)
            compared = pairs.in_turn(bare, other, pairs=PAIRS, unit="ms a step")
            pairs.report(f"step of the example on 4 ranks, {label}", compared, a="bare", b=label)


if __name__ == "__main__":
    main()
