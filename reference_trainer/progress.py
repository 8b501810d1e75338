"""What a run tells while it goes: lines on stderr, metrics in a file, the result on stdout; from rank 0 only."""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from reference_trainer.options import Options


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """Describe one step over all ranks; the schema of a line of `--metrics`."""

    step: int
    loss: float
    tokens_per_s: float
    lr: float
    grad_norm: float


class Journal:
    """Report the steps of a run on rank 0, and keep quiet on the others."""

    def __init__(self, options: Options, *, rank: int, clock: Callable[[], float]) -> None:
        self.options = options
        self.speaks = rank == 0
        self.clock = clock
        self.steps: list[StepMetrics] = []
        # Opened once every rank has joined: the others have looked by then whether the file is there already.
        # Line by line: what was written survives a kill.
        path = options.metrics if self.speaks else None
        self.file = path.open("w", encoding="utf-8", buffering=1) if path else None
        self.started_s = self.last_s = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.file:
            self.file.close()

    def announce(self, text: str) -> None:
        """Print a line about the run as a whole."""
        if self.speaks:
            print(text, file=sys.stderr, flush=True)

    def record_step(self, step: int, *, loss: float, lr: float, grad_norm: float) -> None:
        """Write the metrics of a step that ends now, and about ten lines of progress a run."""
        now_s = self.clock()
        tokens_per_s = self.options.tokens_per_step / (now_s - self.last_s)
        self.last_s = now_s
        metrics = StepMetrics(step=step, loss=loss, tokens_per_s=tokens_per_s, lr=lr, grad_norm=grad_norm)
        self.steps.append(metrics)
        if self.file:
            self.file.write(json.dumps(asdict(metrics)) + "\n")
        if step == 1 or step % max(1, self.options.steps // 10) == 0:
            self.announce(
                f"step {step}/{self.options.steps}  loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s  "
                f"lr {lr:.1e}  grad norm {grad_norm:.2f}"
            )

    def summarise(self) -> None:
        """Print the result of the run on stdout."""
        if not self.speaks:
            return
        duration_s = self.last_s - self.started_s
        tokens_per_s = len(self.steps) * self.options.tokens_per_step / duration_s
        print(
            f"trained {len(self.steps)} steps in {duration_s:.1f} s: loss {self.steps[0].loss:.3f} -> "
            f"{self.steps[-1].loss:.3f}, {tokens_per_s:,.0f} tokens/s",
            flush=True,
        )
