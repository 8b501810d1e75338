"""Train a small GPT of Megatron-Core with pipeline and tensor parallelism: `megatron_pipeline.py TP PP [VIRTUAL]`."""

import contextlib
import sys

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

VOCABULARY, LENGTH, MICROBATCHES = 64, 32, 4


def main() -> None:
    """Train 12 steps of 4 microbatches of 2 sequences."""
    tp, pp = int(sys.argv[1]), int(sys.argv[2])
    virtual = int(sys.argv[3]) if len(sys.argv) > 3 else None
    torch.distributed.init_process_group("gloo")
    torch.cuda.current_device = lambda: "cpu"  # Megatron-Core asks it for the device of its receive buffers
    torch.cuda.synchronize = lambda *_: None
    zeros = torch.zeros
    torch.zeros = lambda *sizes, **options: zeros(*sizes, **options | {"device": "cpu"})  # its schedules say "cuda"
    parallel_state.initialize_model_parallel(tp, pp, virtual_pipeline_model_parallel_size=virtual)
    tensor_parallel.random.CudaRNGStatesTracker.fork = lambda *_, **__: contextlib.nullcontext()
    torch.manual_seed(0)
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=virtual,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        batch_p2p_comm=False,
        overlap_p2p_comm=False,
    )
    chunks = [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            VOCABULARY,
            LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=i),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=i),
            **({"vp_stage": i} if virtual else {}),
        )
        for i in range(virtual or 1)
    ]
    optimizer = torch.optim.AdamW([p for chunk in chunks for p in chunk.parameters()], lr=1e-3)
    schedule = get_forward_backward_func()
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

    def forward_step(batches, model):
        ids = next(batches)
        losses = model(ids, positions, mask, labels=ids)
        return losses, lambda output: (output.mean(), {"loss": output.detach().mean()})

    for step in range(12):
        generator = torch.Generator().manual_seed(step)
        batch = [torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator) for _ in range(MICROBATCHES)]
        optimizer.zero_grad()
        schedule(
            forward_step_func=forward_step,
            data_iterator=[iter(batch) for _ in chunks] if virtual else iter(batch),
            model=chunks if virtual else chunks[0],
            num_microbatches=MICROBATCHES,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
