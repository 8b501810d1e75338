"""Finetune a small Llama with a recipe of torchtune: `torchtune_recipe.py FOLDER RECIPE [KEY=VALUE ...]`."""

import importlib.util
import os
import sys
from pathlib import Path

import torch
import torchtune
from omegaconf import OmegaConf
from torch.utils.data import Dataset
from torchtune import training
from torchtune.models.llama3 import llama3

VOCABULARY, LENGTH, BATCH, STEPS = 64, 16, 4, 12

# What recipes ask of a device, and the CPU has not.
torch.cpu.empty_cache = torch.cpu.reset_peak_memory_stats = lambda: None
training.get_memory_stats = lambda **_: {}
training.log_memory_stats = lambda _: None


class Tokenizer:
    """What a recipe asks of a tokenizer."""

    pad_id = 0


class Texts(Dataset):
    """Texts of 16 tokens, and with `lengths` of up to 16."""

    def __init__(self, _: object, lengths: int = 1, **__: object) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, list[int]]:
        length = LENGTH - index % self.lengths
        tokens = [2 + (index + 3 * at) % (VOCABULARY - 2) for at in range(length)]
        return {"tokens": tokens, "labels": tokens}


def make_model() -> torch.nn.Module:
    """Return the model without its weights, as a recipe builds it."""
    return llama3(
        vocab_size=VOCABULARY, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64,
        intermediate_dim=64,
    )  # fmt: skip


def configure(folder: Path, options: list[str]) -> Path:
    """Write weights and the configuration of a recipe; return the latter."""
    torch.manual_seed(0)
    base = folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    torch.save(make_model().state_dict(), base / "model.pt")
    config = {
        "output_dir": str(folder / "out"),
        "tokenizer": {"_component_": "torchtune_recipe.Tokenizer"},
        "dataset": {"_component_": "torchtune_recipe.Texts"},
        "model": {"_component_": "torchtune_recipe.make_model"},
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(base),
            "checkpoint_files": ["model.pt"],
            "output_dir": str(folder / "out"),
            "model_type": "LLAMA3",
        },
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(folder),
            "filename": "log.txt",
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-3},
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "batch_size": BATCH,
        "max_steps_per_epoch": STEPS,
        "epochs": 1,
        "gradient_accumulation_steps": 1,
        "seed": 0,
        "shuffle": True,
        "resume_from_checkpoint": False,
        "device": "cpu",
        "dtype": "fp32",
    }
    path = folder / "config.yaml"
    OmegaConf.save(OmegaConf.merge(config, OmegaConf.from_dotlist(options)), path)
    return path


def main() -> None:
    """Train 12 steps of 4 sequences a rank, and save the model."""
    folder = Path(sys.argv[1]) / os.environ["RANK"]
    path = Path(torchtune.__file__).parents[1] / "recipes" / f"{sys.argv[2]}.py"
    spec = importlib.util.spec_from_file_location("recipe", path)
    recipe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recipe)
    sys.argv[1:] = ["--config", str(configure(folder, sys.argv[3:]))]
    recipe.recipe_main()


if __name__ == "__main__":
    main()
