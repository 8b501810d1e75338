"""Train a small Llama with torchtitan's Trainer: `torchtitan_trainer.py FOLDER degree=N ...`."""

import inspect
import json
import os
import sys
import types
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule

VOCABULARY, LENGTH, BATCH = 64, 32, 4


class HostAsDevice(types.ModuleType):
    """What torchtitan asks of a device, of the host: it has no name for the CPU."""

    def __getattr__(self, name: str) -> object:
        return getattr(torch.cpu, name)

    def get_device_name(self, *_: object) -> str:
        return "cpu"

    def get_device_properties(self, *_: object) -> object:
        return types.SimpleNamespace(total_memory=2**30, name="cpu")

    def memory_stats(self, *_: object) -> dict[str, int]:
        return {}

    def current_device(self) -> int:
        return 0

    def nothing(self, *_: object) -> None:
        pass

    reset_peak_memory_stats = empty_cache = set_device = nothing


torch._utils._get_available_device_type = lambda: "cpu"
torch._utils._get_device_module = lambda _: HostAsDevice("host")

from torchtitan.components.checkpoint import CheckpointManager  # noqa: E402
from torchtitan.config import ParallelismConfig, TrainingConfig  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.hf_datasets.text_datasets import HuggingFaceTextDataLoader  # noqa: E402
from torchtitan.models.common.attention import FlexAttention  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402


def attend(_: FlexAttention, *heads: torch.Tensor, **__: object) -> torch.Tensor:
    """Attend causally: flex attention has no backward pass on the CPU."""
    q, k, v = (x.transpose(1, 2) for x in heads)
    attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return attended.transpose(1, 2)


# torchtitan reads the names of the arguments.
attend.__signature__ = inspect.signature(FlexAttention.forward)
FlexAttention.forward = attend


def divide(model: FSDPModule, factor: float) -> None:
    """Divide gradients beside their reduction: gloo has no premultiplied sum."""
    model.set_force_sum_reduction_for_comms(True)
    set_gradient_divide_factor(model, factor)


set_gradient_divide_factor = FSDPModule.set_gradient_divide_factor
FSDPModule.set_gradient_divide_factor = divide


# This version asks for a torch that has torch.distributed.set_timeout.
utils.set_pg_timeouts = lambda *_, **__: None


def write_data(folder: Path) -> None:
    """Write a tokenizer of one letter a token, and texts."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    letters = {chr(48 + number): number for number in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    (folder / "texts").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "1", "bos_token": "2"}))
    texts = ({"text": "".join(chr(48 + (7 * line + at) % VOCABULARY) for at in range(400))} for line in range(64))
    (folder / "texts" / "data.json").write_text("\n".join(map(json.dumps, texts)))


def main() -> None:
    """Train 12 steps of 4 sequences for each data-parallel rank."""
    folder = Path(sys.argv[1]) / os.environ["RANK"]
    degrees = dict(argument.split("=") for argument in sys.argv[2:])
    write_data(folder)
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.hf_assets_path = str(folder)
    config.dump_folder = str(folder / "out")
    config.training = TrainingConfig(local_batch_size=BATCH, seq_len=LENGTH, steps=12, disable_cuda_graphs=True)
    config.dataloader = HuggingFaceTextDataLoader.Config(dataset="c4_test", dataset_path=str(folder / "texts"))
    config.parallelism = ParallelismConfig(
        **{key: int(value) if value.isdecimal() else value for key, value in degrees.items()}
    )
    config.checkpoint = CheckpointManager.Config(enable=False)
    config.validator.enable = False
    trainer = config.build()
    trainer.train()
    trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
