"""Train eight steps of known length on 2 ranks, rank 1 being 10 ms late at the all_reduce of each.

Of each step, in ms on the stream: forward 30; backward 20 (rank 1: 30), an asynchronous all_reduce of 15 beside 5 of
compute, the wait for it, 10 more; optimizer 10. The argument `host` has the host sleep 40 between steps, once the
device has nothing left to do.
"""

import sys
import time

import torch
import torch.distributed as dist

from tests.accelerator import simulated_device as sim

MS = 1_000_000
STEPS = 8


class Backward(torch.autograd.Function):
    """Nothing forward; the communication of the step backward."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Return it."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Compute, reduce the gradient beside more computation, wait, and compute again."""
        grad = grad.contiguous()
        sim.spin((20 + 10 * dist.get_rank()) * MS)
        work = dist.all_reduce(grad, async_op=True)
        sim.spin(5 * MS)
        work.wait()
        sim.spin(10 * MS)
        return grad


class Model(torch.nn.Module):
    """One weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take 30 ms."""
        sim.spin(30 * MS)
        return Backward.apply(self.weight * x).sum()


class Optimizer(torch.optim.SGD):
    """SGD that takes 10 ms."""

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step."""
        sim.spin(10 * MS)
        super().step(closure)


def main() -> None:
    """Start both devices at one time and train."""
    dist.init_process_group("cpu:gloo,sim:simccl")
    sim.set_device(0)
    model, x = Model().to("sim"), torch.ones(1000, device="sim")
    optimizer = Optimizer(model.parameters(), lr=0.1)
    dist.all_reduce(x)  # from here on the device is followed
    sim.synchronize()
    sim.configure(kernel_ns=0, trace=1)
    sim.set_cost("simccl::ALLREDUCE", 15 * MS)
    together = torch.tensor([sim.now()])
    dist.all_reduce(together, op=dist.ReduceOp.MAX)
    sim.spin_until(int(together.item()) + 100 * MS)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(x).backward()
        optimizer.step()
        if "host" in sys.argv:
            sim.synchronize()
            time.sleep(0.04)
    sim.synchronize()
    reduced = [task for task in sim.take_trace() if task.name == "simccl::ALLREDUCE"]
    assert len(reduced) == STEPS
    if "host" not in sys.argv:  # the answer key is what ran
        waits = {task.met_ns - task.start_ns for task in reduced}
        assert waits == {(1 - dist.get_rank()) * 10 * MS}, waits
    del model, optimizer
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
