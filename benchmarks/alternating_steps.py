"""A rank of the reference trainer that records every other step: run by torchrun, for `step_cost`.

In a step that is not recorded, torch has every function back that dtprof has replaced, fall-through kernels lie over
the hook's, and optimizers have no hooks of ours. Two steps of the one kind and two of the other take turns, so that
neighbours make pairs and what drifts falls on both alike. One step between them is not counted: the interpreter has
to specialise anew what a switch has changed. Threads that recording has started keep running through both.
"""

import json
import os
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RESULTS, LATER = "DTPROF_BENCHMARK_RESULTS", "LATER_"
SETTLED = 12
"""Steps until dtprof has replaced all that it will: models are found in the first three."""
ORDER = ((False, False), (False, True), (False, True), (True, False), (True, True), (True, True))
"""Whether a step is recorded, and whether it is counted."""
Place = tuple[Any, str]


def main() -> None:
    """Train with the arguments of the command line."""
    import torch

    import dtprof
    from reference_trainer import faults, train  # noqa: F401  # with all of torch that the trainer uses
    from reference_trainer.__main__ import main as run_trainer

    before = dict(_functions())
    for name in [name for name in os.environ if name.startswith(LATER)]:
        os.environ[name.removeprefix(LATER)] = os.environ.pop(name)
    from dtprof.capture import arm

    arm.arm()
    steps = AlternatingSteps(torch, before, str(Path(dtprof.__file__).parent))
    faults.Fault.before_step = lambda _, step: steps.begin(step)  # type: ignore[assignment,method-assign]
    try:
        run_trainer(sys.argv[1:])
    finally:
        steps.save()


class AlternatingSteps:
    """Turns recording on and off where a step begins, and takes the time."""

    def __init__(self, torch: Any, before: dict[Place, Any], package: str) -> None:
        """Know what torch had before dtprof came."""
        self._torch = torch
        self._before = before
        self._package = package
        self._changes: list[tuple[Any, str, Any, Any]] = []
        self._tables: list[tuple[Any, dict[Any, Any]]] = []
        self._ops: list[str] = []
        self._began = (0, 0)
        self._bypass: Any = None
        self._times: dict[str, list[tuple[int, int]]] = {"bare": [], "recorded": []}
        self._recorded: bool | None = None
        self._counted = False

    def begin(self, step: int) -> None:
        """Take the time of the step that ends here, and begin the next one."""
        now = time.monotonic_ns(), time.process_time_ns()
        if self._counted:
            taken = now[0] - self._began[0], now[1] - self._began[1]
            self._times["recorded" if self._recorded else "bare"].append(taken)
        if step == SETTLED:
            self._find_changes()
        if step >= SETTLED:
            recorded, self._counted = ORDER[(step - SETTLED) % len(ORDER)]
            if self._recorded is not recorded:
                self._recorded = recorded
                self._switch(recorded)
        self._began = time.monotonic_ns(), time.process_time_ns()

    def save(self) -> None:
        """Leave the steps behind for the benchmark: wall and processor time of this process, in ns."""
        path = Path(os.environ[RESULTS], f"rank-{os.environ['RANK']}.json")
        changed = sorted({name for _, name, _, _ in self._changes})
        path.write_text(
            json.dumps({"times": self._times, "changed": changed, "operators": len(self._ops)}), encoding="utf-8"
        )

    def _find_changes(self) -> None:
        import torch.optim.optimizer as optimizers

        names = [name.partition("::")[2] for name in self._torch._C._dispatch_get_all_op_names() if "c10d::" in name]
        has = self._torch._C._dispatch_has_kernel_for_dispatch_key
        self._ops = [name for name in names if has(f"c10d::{name}", "BackendSelect")]
        for (owner, name), value in _functions():
            if _file_of(value).startswith(self._package):
                self._changes.append((owner, name, self._before.get((owner, name)), value))
        tables = (optimizers._global_optimizer_pre_hooks, optimizers._global_optimizer_post_hooks)
        self._tables = [(table, dict(table)) for table in tables]

    def _switch(self, recorded: bool) -> None:
        if self._bypass is not None:
            self._bypass._destroy()
            self._bypass = None
        if not recorded:
            self._bypass = self._torch.library.Library("c10d", "IMPL")
            for op in self._ops:
                self._bypass.impl(op, self._torch.library.fallthrough_kernel, "BackendSelect", allow_override=True)
        for owner, name, bare, ours in self._changes:
            if recorded or bare is not None:
                setattr(owner, name, ours if recorded else bare)
            else:
                delattr(owner, name)
        for table, hooks in self._tables:
            table.clear()
            table.update(hooks if recorded else {})


def _functions() -> Iterator[tuple[Place, Any]]:
    """Return the functions of torch and the trainer, of modules and of classes."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("torch", "reference_trainer"):
            continue
        for attribute, value in list(vars(module).items()):
            if issubclass(type(value), type):  # torch.distributed.reduce_op warns where it is asked for its class
                yield from (((value, own), member) for own, member in list(vars(value).items()) if callable(member))
            elif callable(value):
                yield (module, attribute), value


def _file_of(function: Any) -> str:
    code = getattr(getattr(function, "__func__", function), "__code__", None)
    return code.co_filename if isinstance(code, types.CodeType) else ""


if __name__ == "__main__":
    main()
