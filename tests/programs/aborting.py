"""Abort within a method, in a function whose name is not ASCII."""

import os

import torch
import torch.distributed as dist

named: dict[str, object] = {"os": os}
exec("def gr\u00f6sse():\n    os.abort()\n", named)


class Model:
    def step(self) -> None:
        named["gr\u00f6sse"]()  # type: ignore[operator]


def main() -> None:
    dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))
    Model().step()


main()
