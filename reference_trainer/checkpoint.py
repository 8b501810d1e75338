"""Save and load everything that a run needs to go on: weights, state of the optimizer, random numbers, position.

Tensors go under the names of the undivided model, each rank writing its part of them (torch.distributed.checkpoint). So
any layout reads what any other wrote.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, cast

import torch
from torch import Tensor, distributed
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.optim import Optimizer

from reference_trainer.batches import Batches
from reference_trainer.checkpoint_folder import CheckpointFolder, Origin
from reference_trainer.interfaces import Part
from reference_trainer.options import Options
from reference_trainer.parallelism.offload import OffloadedAdamW
from reference_trainer.token_file import TokenFile


class Checkpoints:
    """Save the parts of this rank every so many steps, together with all other ranks; nothing unless asked to."""

    def __init__(self, options: Options, tokens: TokenFile, parts: Sequence[Part], batches: Batches) -> None:
        self.options = options.checkpoint
        self.num_steps = options.steps
        self.parts = parts
        self.batches = batches
        self.rank = distributed.get_rank() if distributed.is_initialized() else 0
        self.group: distributed.ProcessGroup | None = None
        self.pending: Future[Any] | None = None
        self.step, self.position = 0, batches.state_dict()
        if self.options is None:
            return
        self.folder = CheckpointFolder(self.options.folder, num_kept=self.options.num_kept)
        self.origin = Origin.of(options, tokens)
        if self.rank == 0:
            self.folder.clear_unfinished()
        if distributed.is_initialized():
            # Its own group: an asynchronous save talks to other ranks while training does.
            group = distributed.new_group(backend="gloo", group_desc="checkpoint")
            self.group = cast(distributed.ProcessGroup, group)

    def load(self) -> int:
        """Continue from the last checkpoint; return its step, or 0 where there is none. Every rank must call this."""
        saved = self.folder.find_latest() if self.options and self.options.resume else None
        if saved is None:
            return 0
        for part in self.parts:
            _allocate_state(part.optimizer)
        tensors = self._collect()
        known = FileSystemReader(saved.path).read_metadata().state_dict_metadata
        # A rank that was not there when it was saved keeps the random numbers that it was seeded with.
        state = {key: copies[0] for key, copies in tensors.items() if key != self._random_key or key in known}
        load(state, checkpoint_id=saved.path, process_group=self.group, no_dist=self.group is None)
        for copies in tensors.values():
            for copy in copies[1:]:
                copy.copy_(copies[0])
        if self._random_key in state:
            torch.set_rng_state(state[self._random_key])
        self.batches.load_state_dict(saved.position)
        return saved.step

    def after_step(self, step: int) -> None:
        """Save where this step is one to save after, and after the last."""
        if self.pending is not None and self.pending.done():
            self.finish()
        if self.options and (step % self.options.every == 0 or step == self.num_steps):
            self.finish()
            self._save(step)

    def finish(self) -> None:
        """Wait until what is being written is whole, and point to it."""
        if self.pending is not None:
            self.pending.result()
            self._publish()
            self.pending = None

    def _save(self, step: int) -> None:
        assert self.options is not None
        self.step, self.position = step, self.batches.state_dict()
        state = {key: copies[0] for key, copies in self._collect().items()}
        path, alone = self.folder.name_unfinished(step), self.group is None
        if self.options.asynchronous:
            saving = async_save(state, checkpoint_id=path, process_group=self.group, no_dist=alone)
            assert isinstance(saving, Future)
            self.pending = saving
            return
        save(state, checkpoint_id=path, process_group=self.group, no_dist=alone)
        self._publish()

    def _publish(self) -> None:
        if self.rank == 0:
            self.folder.publish(self.step, origin=self.origin, position=self.position)

    @property
    def _random_key(self) -> str:
        return f"random.{self.rank}"

    def _collect(self) -> dict[str, list[Tensor]]:
        """Return all tensors of this rank under names that no layout changes; tied weights may have copies."""
        tensors: dict[str, list[Tensor]] = defaultdict(list)
        tensors[self._random_key].append(torch.get_rng_state())
        for part in self.parts:
            state = _find_adamw(part.optimizer).state
            for name, parameter in part.module.named_parameters():
                name = name.removeprefix("module.")  # of DistributedDataParallel
                tensors[f"model.{name}"].append(parameter.detach())
                for kind, value in state.get(parameter, {}).items():
                    tensors[f"optimizer.{kind}.{name}"].append(value)
        return tensors


def _find_adamw(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer inside one that shards its state."""
    return cast(Optimizer, getattr(optimizer, "optim", optimizer))


def _allocate_state(optimizer: Optimizer) -> None:
    """Make room for the state of AdamW, which appears by itself only in the first step."""
    adamw = _find_adamw(optimizer)
    for group in adamw.param_groups:
        for parameter in group["params"]:
            if isinstance(adamw, OffloadedAdamW):
                adamw.state[parameter] = adamw.make_state(parameter)
            elif not adamw.state[parameter]:
                device = parameter.device if group["fused"] or group["capturable"] else "cpu"
                adamw.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
