"""The programs of the corpus and what must be said of each.

A program is a function of its rank; its decorator is its header. `# here` marks the line that must be named, of the
culprit or of those that wait, `# not here` one that must not be named as the culprit's. It names no device, so that it
runs on the CPU over gloo and on the simulated accelerator.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtprof.diagnosis.findings import Finding, Verdict

Body = Callable[[int], object]
HERE, NOT_HERE = "# here", "# not here"
SOUND = "sound"
"""In place of a kind, of programs that are right."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One program and its verdict."""

    body: Body
    kind: str | None  # None: nothing must be found
    culprits: tuple[int, ...]
    ranks: int
    joins: bool  # the runner calls init_process_group for it
    check: str = ""  # as `dtprof run --check` takes it
    also: tuple[tuple[str, int], ...] = ()  # kind and culprit of other faults, which may come first as well

    @property
    def name(self) -> str:
        """The name of the function."""
        return self.body.__name__

    @property
    def file(self) -> str:
        """The name of its file in `programs/`."""
        return Path(inspect.getsourcefile(self.body) or "").name

    @property
    def first_line(self) -> int:
        """The line of its decorator."""
        return inspect.getsourcelines(self.body)[1]

    @property
    def lines(self) -> set[int]:
        """The marked lines."""
        return self._marked(HERE)

    def _marked(self, mark: str) -> set[int]:
        text, first = inspect.getsourcelines(self.body)
        return {first + i for i, line in enumerate(text) if mark in line}

    def mistakes(self, verdict: Verdict, *, exit_status: int | None = None) -> list[str]:
        """Return what is wrong with a verdict, a sentence each, given how the job ended, where that is known."""
        found = [f for f in verdict.findings if f.severity in ("error", "warning")]
        if self.kind is None:
            return [f"false alarm: {f.kind}: {f.summary}" for f in found] or (
                [] if verdict.outcome == "healthy" else [f"outcome {verdict.outcome}: {verdict.cannot_tell}"]
            )
        if not found:
            return [f"nothing found, outcome {verdict.outcome}: {verdict.cannot_tell}"]
        missing = [fault for fault in self.also if not any(_names(finding, *fault) for finding in found)]
        wrong = [f"no finding of {kind} of rank {culprit}" for kind, culprit in missing]
        if exit_status == 0 and verdict.outcome in ("hang", "crash"):
            wrong.append(f"outcome {verdict.outcome} of a job that ended with status 0")
        others = [finding for finding in found if not any(_names(finding, *fault) for fault in self.also)]
        first = (others or found)[0]
        named = _lines_of(first)
        if first.kind != self.kind:
            wrong.append(f"kind {first.kind}: {first.summary}")
        if first.culprit_ranks != self.culprits:
            wrong.append(f"culprits {first.culprit_ranks}: {first.summary}")
        if self.lines and not named & self.lines:
            wrong.append(f"lines {sorted(named)}, none of {sorted(self.lines)}")
        if innocent := {site.line for site in first.culprit_call_sites.values()} & self._marked(NOT_HERE):
            wrong.append(f"lines {sorted(innocent)} of the culprits, where nothing happened")
        return wrong

    def told(self, verdict: Verdict) -> str:
        """Return kind and culprits of the first finding of a verdict, and which of the marked lines it names."""
        found = [finding for finding in verdict.findings if finding.severity in ("error", "warning")]
        if not found:
            return verdict.outcome
        lines = ", ".join(map(str, sorted(_lines_of(found[0]) & self.lines))) or "none"
        culprits = ", ".join(map(str, found[0].culprit_ranks)) or "none"
        return f"{found[0].kind}, culprits {culprits}, marked lines {lines}"


def _names(finding: Finding, kind: str, culprit: int) -> bool:
    return finding.kind == kind and finding.culprit_ranks == (culprit,)


def _lines_of(finding: Finding) -> set[int]:
    """Return the lines that the text of a verdict names: of each site its own, and that of its caller."""
    sites = (*finding.call_sites.values(), *finding.culprit_call_sites.values())
    return {place.line for site in sites for place in (site, site.caller) if place is not None}


PROGRAMS: dict[str, Program] = {}


def faulty(
    kind: str,
    *culprits: int,
    ranks: int = 3,
    joins: bool = True,
    check: str = "",
    also: tuple[tuple[str, int], ...] = (),
) -> Callable[[Body], Body]:
    """Declare a program with a fault, or several."""
    return _declare(kind, culprits, ranks=ranks, joins=joins, check=check, also=also)


def healthy(*, ranks: int = 3, joins: bool = True, check: str = "") -> Callable[[Body], Body]:
    """Declare a program that is right, however odd it looks."""
    return _declare(None, (), ranks=ranks, joins=joins, check=check)


def list_programs(kind: str) -> list[str]:
    """Return the programs that show a kind of fault, each with its file and line; of "sound" those that show none."""
    chosen = [program for program in PROGRAMS.values() if (program.kind or SOUND) == kind]
    return sorted(f"{program.file}:{program.first_line} {program.name}" for program in chosen)


def _declare(
    kind: str | None,
    culprits: tuple[int, ...],
    *,
    ranks: int,
    joins: bool,
    check: str,
    also: tuple[tuple[str, int], ...] = (),
) -> Callable[[Body], Body]:
    def declare(body: Body) -> Body:
        program = Program(body=body, kind=kind, culprits=culprits, ranks=ranks, joins=joins, check=check, also=also)
        assert program.name not in PROGRAMS
        PROGRAMS[program.name] = program
        return body

    return declare


def back_end() -> str:
    """Return the back end of the device that tensors are made on: the runner has chosen it."""
    import torch

    return {"cpu": "gloo", "sim": "simccl", "cuda": "nccl"}[torch.get_default_device().type]


def train(rank: int, steps: int, each: Callable[[int], Any] | None = None, size: int = 8) -> None:
    """Train a small model by hand: gradients are averaged parameter by parameter, then the step is made."""
    import torch
    import torch.distributed as dist

    torch.manual_seed(0)
    model = torch.nn.Linear(size, size)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        loss = model(torch.full((2, size), float(rank + 1))).sum()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if each is not None:
            each(step)
