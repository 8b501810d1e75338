"""Train with TRL's GRPOTrainer: a policy, a reference of it, and a function that rewards: `trl_grpo.py FOLDER`."""

import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

VOCABULARY = 64


def main() -> None:
    """Train 12 steps: 4 completions a rank, of 8 tokens each, upon prompts of 8."""
    torch.manual_seed(0)
    words = {f"w{number}": number for number in range(VOCABULARY)}
    raw = Tokenizer(models.WordLevel(words, unk_token="w0"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="w0", eos_token="w1", unk_token="w0")
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCABULARY, n_positions=32, n_embd=32, n_layer=2, n_head=2,
            bos_token_id=2, eos_token_id=1, pad_token_id=0,
        )
    )  # fmt: skip
    prompts = [" ".join(f"w{2 + (line + 3 * at) % 60}" for at in range(8)) for line in range(64)]
    pretrained = Path(sys.argv[1]) / f"model-{os.environ['RANK']}"  # whence the trainer makes the reference as well
    model.save_pretrained(pretrained)
    trainer = GRPOTrainer(
        model=str(pretrained),
        processing_class=tokenizer,
        reward_funcs=lambda completions, **_: [float(len(set(text.split()))) for text in completions],
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        args=GRPOConfig(
            output_dir=sys.argv[1],
            max_steps=12,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=8,
            generation_kwargs={"min_new_tokens": 8, "max_new_tokens": 8},
            beta=0.1,
            use_cpu=True,
            bf16=False,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
