"""The folder of checkpoints: which are whole, which is the last, and whether it is of this model; free of torch."""

import json
import shutil
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from reference_trainer.errors import UsageError
from reference_trainer.options import Options
from reference_trainer.outputs import make_folder
from reference_trainer.token_file import TokenFile

FORMAT = 1
LATEST, FACTS = "latest", "trainer.json"
UNFINISHED = ".unfinished-"


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Say what a checkpoint belongs to: what may not change when a run continues, by the option that sets it."""

    model: str
    shape: dict[str, Any]
    precision: str
    seed: int
    sequence_length: int
    tokenizer: str
    num_tokens: int

    @classmethod
    def of(cls, options: Options, tokens: TokenFile) -> "Origin":
        """Describe this run."""
        return cls(
            model=options.model,
            shape=asdict(options.shape),
            precision="fp64" if options.precision == "fp64" else "fp32",
            seed=options.seed,
            sequence_length=options.sequence_length,
            tokenizer=options.data.tokenizer,
            num_tokens=tokens.facts.num_tokens,
        )


# What to change when a checkpoint has another value than the run.
ADVICE = {
    "model": "give --model {}",
    "shape": "give the --preset and --vocabulary-size that it was made with: its model has {}",
    "precision": "give --precision {}",
    "seed": "give --seed {}",
    "sequence_length": "give --sequence-length {}",
    "tokenizer": "give --tokenizer {}",
    "num_tokens": "give the --corpus that it was made with, of {:,} tokens",
}


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Name a whole checkpoint and the position it holds."""

    path: Path
    step: int
    position: dict[str, Any]


class CheckpointFolder:
    """Hold checkpoints under `step-N`; what is being written has another name, so that none is ever half there."""

    def __init__(self, path: Path, *, num_kept: int) -> None:
        self.path = path
        self.num_kept = num_kept

    def find_latest(self) -> Saved | None:
        """Return the checkpoint that `latest` names, or None where there is none yet."""
        try:
            name = (self.path / LATEST).read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None
        facts = self._read_facts(name)
        return Saved(path=self.path / name, step=facts["step"], position=facts["position"])

    def refuse_other_run(self, origin: Origin) -> None:
        """Refuse to continue from the checkpoint of another model, or in another text."""
        saved = self.find_latest()
        if saved is None:
            return
        found = self._read_facts(saved.path.name)["origin"]
        for field in fields(Origin):
            theirs, ours = found.get(field.name), getattr(origin, field.name)
            if theirs != ours:
                what = field.name.replace("_", " ")
                advice = ADVICE[field.name].format(_spell(theirs, ours) if field.name == "shape" else theirs)
                raise UsageError(
                    f"--checkpoint {self.path}: {saved.path.name} is of another run: its {what} is "
                    f"{_spell(theirs, ours)}, not {_spell(ours, theirs)}; {advice}, or another folder"
                )

    def refuse_content(self) -> None:
        """Refuse a folder with checkpoints of an earlier run, which a new one would replace."""
        if (self.path / LATEST).exists():
            raise UsageError(
                f"--checkpoint {self.path}: the folder holds checkpoints, which are never overwritten; "
                "give --resume to continue from the last, or another folder"
            )

    def clear_unfinished(self) -> None:
        """Remove what a run left that was killed while it wrote; one rank calls this, before any writes."""
        self.path.mkdir(parents=True, exist_ok=True)
        for folder in self.path.glob(UNFINISHED + "*"):
            shutil.rmtree(folder)

    def name_unfinished(self, step: int) -> Path:
        """Return where all ranks write a checkpoint."""
        return self.path / f"{UNFINISHED}{step}"

    def publish(self, step: int, *, origin: Origin, position: dict[str, Any]) -> None:
        """Give a checkpoint its name, point to it, and remove the oldest; for one rank, once all have written."""
        unfinished = self.name_unfinished(step)
        facts = {"format": FORMAT, "step": step, "position": position, "origin": asdict(origin)}
        (unfinished / FACTS).write_text(json.dumps(facts), encoding="utf-8")
        whole = self.path / f"step-{step}"
        if whole.exists():  # from an attempt that was killed before it could point to it
            shutil.rmtree(whole)
        unfinished.rename(whole)
        pointer = self.path / f"{LATEST}.new"
        pointer.write_text(whole.name + "\n", encoding="utf-8")
        pointer.replace(self.path / LATEST)
        for old in self._find_whole()[: -self.num_kept]:
            shutil.rmtree(old)

    def _find_whole(self) -> list[Path]:
        return sorted(self.path.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))

    def _read_facts(self, name: str) -> dict[str, Any]:
        try:
            facts = json.loads((self.path / name / FACTS).read_text(encoding="utf-8"))
            if facts["format"] != FORMAT:
                raise ValueError(f"format {facts['format']}, not {FORMAT}")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"--checkpoint {self.path}: {name}, which {LATEST} names, cannot be read ({error}); "
                f"write the name of another checkpoint into {LATEST}, or give another folder"
            ) from error
        return dict(facts)


def refuse_folder(options: Options, tokens: TokenFile) -> None:
    """Make the folder; refuse to write over checkpoints of another run, or to go on from those of another model."""
    if options.checkpoint is None:
        return
    folder = CheckpointFolder(options.checkpoint.folder, num_kept=options.checkpoint.num_kept)
    make_folder("--checkpoint", folder.path)
    if options.checkpoint.resume:
        folder.refuse_other_run(Origin.of(options, tokens))
    else:
        folder.refuse_content()


def _spell(value: Any, other: Any) -> str:
    """Write a value; of a shape only what differs."""
    if isinstance(value, dict) and isinstance(other, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items() if other.get(key) != item) or "fewer settings"
    return str(value)
