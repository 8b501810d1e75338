"""What a run tells as it goes: lines or a bar on stderr, metrics in files, the result on stdout; from rank 0 only."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from typing_extensions import Self

from reference_trainer.metrics import Rate, StepMetrics
from reference_trainer.options import Options

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

BAR_WIDTH = 24


class Journal:
    """Report the steps of a run on rank 0, and keep quiet on the others."""

    def __init__(
        self, options: Options, *, rank: int, clock: Callable[[], float], num_done: int = 0, rate: Rate | None = None
    ) -> None:
        self.options = options
        self.speaks = rank == 0
        self.clock = clock
        self.rate = rate
        self.steps: list[StepMetrics] = []
        self.num_done = num_done
        self.has_bar = self.speaks and sys.stderr.isatty()
        # Opened once every rank has joined: the others have looked by then whether the file is there already.
        self.file = open_metrics(options.metrics, num_done=num_done) if self.speaks and options.metrics else None
        self.scalars = open_scalars(options.tensorboard, num_done) if self.speaks and options.tensorboard else None
        self.started_s = self.last_s = clock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.has_bar:
            print(file=sys.stderr)
        if self.file:
            self.file.close()
        if self.scalars:
            self.scalars.close()

    def announce(self, text: str) -> None:
        """Print a line about the run as a whole."""
        if self.speaks:
            print(f"\r\033[K{text}" if self.has_bar else text, file=sys.stderr, flush=True)

    def record_step(self, step: int, *, loss: float, lr: float, grad_norm: float) -> None:
        """Write the metrics of a step that ends now; show a bar on a terminal, else about ten lines a run."""
        now_s = self.clock()
        tokens_per_s = self.options.tokens_per_step / (now_s - self.last_s)
        mfu = self.rate.measure(tokens_per_s) if self.rate else None
        self.last_s = now_s
        metrics = StepMetrics(
            step=step, loss=loss, tokens_per_s=tokens_per_s, lr=lr, grad_norm=grad_norm, model_flops_share=mfu
        )
        self.steps.append(metrics)
        if not self.speaks:
            return
        self._write(metrics.fields(), step)
        is_milestone = step == 1 or step % max(1, self.options.steps // 10) == 0
        if self.has_bar:
            print(f"\r\033[K{draw_bar(step, self.options.steps)} {metrics.describe()}", end="", file=sys.stderr)
            sys.stderr.flush()
        elif is_milestone:
            self.announce(f"step {step}/{self.options.steps}  {metrics.describe()}")

    def record_evaluation(self, step: int, *, loss: float) -> None:
        """Write the loss of held-out text behind a step; the time that it took counts for no step."""
        self.last_s = self.clock()
        if self.speaks:
            self._write({"step": step, "evaluation_loss": loss}, step)
        self.announce(f"step {step}/{self.options.steps}  held-out loss {loss:.3f}")

    def summarise(self) -> None:
        """Print the result of the run on stdout."""
        if not self.speaks:
            return
        if not self.steps:
            print(f"nothing to train: the checkpoint is of step {self.num_done} of {self.options.steps}", flush=True)
            return
        duration_s = self.last_s - self.started_s
        tokens_per_s = len(self.steps) * self.options.tokens_per_step / duration_s
        share = f", {self.rate.describe(tokens_per_s)}" if self.rate else ""
        print(
            f"trained {len(self.steps)} steps in {duration_s:.1f} s: loss {self.steps[0].loss:.3f} -> "
            f"{self.steps[-1].loss:.3f}, {tokens_per_s:,.0f} tokens/s{share}",
            flush=True,
        )

    def _write(self, values: dict[str, float], step: int) -> None:
        if self.file:
            self.file.write(json.dumps(values) + "\n")
        if self.scalars:
            for name, value in values.items():
                if name != "step":
                    self.scalars.add_scalar(name, value, step)


def draw_bar(step: int, num_steps: int) -> str:
    """Draw how much of a run is done."""
    filled = BAR_WIDTH * step // num_steps
    return f"[{'#' * filled}{'.' * (BAR_WIDTH - filled)}] {step}/{num_steps}"


def open_metrics(path: Path, *, num_done: int) -> TextIO:
    """Open the file of metrics; of an earlier run that is resumed, keep the lines up to the step of its checkpoint.

    Each step is printed once. Output is flushed line by line, so it survives a kill.
    """
    lines = path.read_text(encoding="utf-8").splitlines() if num_done and path.exists() else []
    kept = [line for line in lines if _read_step(line) <= num_done]
    file = path.open("w", encoding="utf-8", buffering=1)
    file.writelines(line + "\n" for line in kept)
    return file


def open_scalars(folder: Path, num_done: int) -> "SummaryWriter":
    """Open a folder of TensorBoard; scalars of steps that are done again are taken back."""
    from torch.utils.tensorboard import SummaryWriter  # loads slowly, and is seldom wanted

    writer: SummaryWriter = SummaryWriter(str(folder), purge_step=num_done + 1)
    return writer


def _read_step(line: str) -> float:
    """Return the step of a line; the last may have been cut off by a kill."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
