"""Forward passes under every wrapper: models.py WRAPPER, on two ranks (one for `none` and `compiled`).

Four steps; an evaluation follows each. The inner layers must not be seen as models of their own.
"""

import gc
import io
import pickle
import sys
import time

import torch
import torch.distributed as dist

DELAY_S = 0.01
STEPS = 4


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(32, 32)

    def forward(self, x):
        return torch.relu(self.layer(x))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

    def forward(self, x):
        if not torch.compiler.is_compiling():
            time.sleep(DELAY_S)
        for block in self.blocks:
            x = block(x)
        return x


def wrap(model, wrapper):
    if wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    if wrapper == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        return FullyShardedDataParallel(model, device_id="cpu", auto_wrap_policy=ModuleWrapPolicy({Block}))
    if wrapper == "fsdp2":
        from torch.distributed.fsdp import fully_shard

        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)
    if wrapper == "compiled":
        return torch.compile(model, backend="aot_eager", fullgraph=True)
    return model


def fails(model):
    try:
        model(torch.ones(1, 33))
    except RuntimeError:
        return
    raise AssertionError("a wrong shape must fail")


def main(wrapper):
    if wrapper not in ("none", "compiled"):
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = wrap(Model(), wrapper)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(STEPS):
        model(torch.ones(1, 32)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            model(torch.ones(1, 32))
        model.train()
    if wrapper == "none":
        fails(model)
        model(torch.ones(1, 32))
        pickle.loads(pickle.dumps(model))
        torch.jit.script(model.blocks[0])(torch.ones(1, 32))
        torch.compile(model, backend="eager", fullgraph=True)(torch.ones(1, 32))
    if wrapper == "fsdp2":
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import get_model_state_dict

        folder = sys.argv[2]
        dcp.save(get_model_state_dict(model), checkpoint_id=folder)
        dcp.async_save(get_model_state_dict(model), checkpoint_id=folder + "-later").result()
        dcp.load(get_model_state_dict(model), checkpoint_id=folder)
    if wrapper == "ddp":
        torch.load(io.BytesIO(saved(model)), weights_only=True)
    assert gc.isenabled()
    if dist.is_initialized():
        dist.barrier()


def saved(model):
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    return buffer.getvalue()


if __name__ == "__main__":
    main(sys.argv[1])
    if dist.is_initialized():
        dist.destroy_process_group()
