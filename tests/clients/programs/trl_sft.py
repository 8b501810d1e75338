"""Train with TRL's trainers: `trl_sft.py FOLDER sft|bfd|wrapped|dpo`; writes the tokens that TRL counts."""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY, LENGTH, BATCH, STEPS = 64, 32, 4, 12
COMMON = {
    "max_steps": STEPS, "per_device_train_batch_size": BATCH, "use_cpu": True, "bf16": False, "save_strategy": "no",
    "report_to": [], "disable_tqdm": True, "logging_steps": 1, "max_length": LENGTH,
}  # fmt: skip


def text(line: int, length: int) -> str:
    """Return a text of so many words."""
    return " ".join(f"w{4 + (line + 3 * at) % 60}" for at in range(length))


def main() -> None:
    """Train 12 steps of 4 sequences a rank, of up to 32 tokens."""
    torch.manual_seed(0)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", eos_token="w1", unk_token="w0")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            bos_token_id=2, eos_token_id=1, pad_token_id=0, max_position_embeddings=64,
        )
    )  # fmt: skip
    if sys.argv[2] == "dpo":
        from trl import DPOConfig, DPOTrainer

        pretrained = Path(sys.argv[1]) / f"model-{os.environ['RANK']}"
        model.save_pretrained(pretrained)
        pairs = {
            "prompt": [text(line, 8) for line in range(64)],
            "chosen": [" " + text(line + 1, 8 + line % 5) for line in range(64)],
            "rejected": [" " + text(line + 2, 8 + line % 3) for line in range(64)],
        }
        trainer = DPOTrainer(
            str(pretrained), args=DPOConfig(sys.argv[1], **COMMON), processing_class=tokenizer,
            train_dataset=Dataset.from_dict(pairs),
        )  # fmt: skip
    else:
        from trl import SFTConfig, SFTTrainer

        packing = {} if sys.argv[2] == "sft" else {"packing": True, "packing_strategy": sys.argv[2]}
        texts = [text(line, 6 + line % 11) for line in range(512)]
        trainer = SFTTrainer(
            model, args=SFTConfig(sys.argv[1], **COMMON, **packing), processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"text": texts}),
        )  # fmt: skip
    trainer.train()
    if trainer.accelerator.is_main_process:
        (Path(sys.argv[1]) / "tokens").write_text(str(round(trainer.state.log_history[-2].get("num_tokens", 0))))
        print([entry.get("num_tokens") for entry in trainer.state.log_history])


if __name__ == "__main__":
    main()
