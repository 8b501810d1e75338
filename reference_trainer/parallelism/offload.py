"""Memory of the host in place of the device's: for the state of the optimizer, and for activations until the backward.

As ZeRO-Offload (Ren et al. 2021) the host holds weights and moments in full precision and updates them there; gradients
go down and weights go up. On a CPU both are copies in the same memory, and the numbers stay what they were.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from reference_trainer.models import layer_lists

SMALLEST_BYTES = 4096
"""Of an activation, to be worth a copy."""


class OffloadedAdamW(AdamW):
    """AdamW on the host, over copies of the weights that lie there with their moments; each rank updates its shards."""

    _copies: dict[Tensor, tuple[Tensor, Tensor]]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Fetch the gradients, update, and send the weights back."""
        assert closure is None
        if not hasattr(self, "_copies"):
            # Now, not before: a checkpoint may have been loaded since this was made.
            self._copies = {}
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if parameters:
                self._update(group, parameters)

    def make_state(self, parameter: Tensor) -> dict[str, Tensor]:
        """Return the state before the first step; of a sharded weight it is sharded alike."""
        return {
            "step": torch.zeros((), dtype=torch.float32),
            "exp_avg": _like(parameter, _on_host(parameter).zero_()),
            "exp_avg_sq": _like(parameter, _on_host(parameter).zero_()),
        }

    def _update(self, group: dict[str, Any], parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter not in self._copies:
                self._copies[parameter] = _on_host(parameter).copy_(_local(parameter)), _on_host(parameter)
            if not self.state[parameter]:
                self.state[parameter] = self.make_state(parameter)
            grad = parameter.grad
            assert grad is not None
            self._copies[parameter][1].copy_(_local(grad), non_blocking=True)
        _wait_for_copies(_local(parameters[0]).device)
        states = [self.state[parameter] for parameter in parameters]
        adamw(
            [self._copies[parameter][0] for parameter in parameters],
            [self._copies[parameter][1] for parameter in parameters],
            [_local(state["exp_avg"]) for state in states],
            [_local(state["exp_avg_sq"]) for state in states],
            [],
            [state["step"] for state in states],
            fused=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )
        for parameter in parameters:
            # The next step overwrites these copies only behind a wait for the gradients, which come after this.
            _local(parameter).copy_(self._copies[parameter][0], non_blocking=True)


def offload_activations(model: nn.Module, *, enabled: bool) -> None:
    """Keep what a layer saves for its backward pass on the host, except weights and what is small."""
    if enabled:
        for layers in layer_lists(model):
            for layer in layers.values():
                # In place of a wrapper, which would change the names of the weights.
                layer.forward = _offloading(layer.forward)


def _offloading(forward: Callable[..., Any]) -> Callable[..., Any]:
    def run(*arguments: Any, **keywords: Any) -> Any:
        with saved_tensors_hooks(_to_host, _from_host):
            return forward(*arguments, **keywords)

    return run


def _to_host(saved: Tensor) -> Tensor | tuple[torch.device, Tensor]:
    base = saved._base if saved._is_view() else saved
    if isinstance(base, nn.Parameter) or isinstance(saved, DTensor) or saved.nbytes < SMALLEST_BYTES:
        return saved
    # Behind the kernel that makes it, in the order of the stream; so is the way back.
    return saved.device, _on_host(saved).copy_(saved, non_blocking=True)


def _from_host(packed: Tensor | tuple[torch.device, Tensor]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    device, copy = packed
    return copy.to(device, non_blocking=True)


def _on_host(tensor: Tensor) -> Tensor:
    """Make room for what this rank holds of a tensor, in memory that a device can copy to by itself."""
    local = _local(tensor)
    return torch.empty(local.shape, dtype=local.dtype, device="cpu", pin_memory=local.device.type != "cpu")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _wait_for_copies(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
