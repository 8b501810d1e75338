"""Faults to inject on purpose, one class each, and the finding that dtprof must report for it; free of torch."""

from reference_trainer.errors import UsageError
from reference_trainer.faults import collectives, exits, model_parts, slowness, waits
from reference_trainer.faults.base import Fault, Scene

__all__ = ["FAULTS", "Fault", "Scene", "describe_faults", "parse_fault"]

MAX_DIGITS = 9  # of a value; no clock waits longer than some 10**9 seconds

FAULTS: dict[str, type[Fault]] = {
    fault.name: fault
    for fault in (
        slowness.SlowRank,
        slowness.GrowingSlowRank,
        slowness.RandomSlowRank,
        slowness.SlowBackward,
        slowness.SlowStage,
        slowness.SlowLink,
        collectives.SkipCollective,
        collectives.SwapCollectives,
        collectives.ResizeCollective,
        collectives.WrongDtype,
        collectives.WrongRoot,
        collectives.WrongReduceOp,
        collectives.Rank0Barrier,
        collectives.CrossGroupInversion,
        collectives.UnwaitedAsync,
        collectives.SmallCollectives,
        exits.UnevenData,
        exits.EarlyBreak,
        exits.RaiseException,
        exits.KillRank,
        exits.StopRank,
        exits.ExitRank,
        exits.OutOfMemory,
        waits.LoaderHang,
        waits.TakenLock,
        waits.EmptyFifo,
        waits.LongCheckpoint,
        waits.MemoryLeak,
        model_parts.UnusedParameters,
        model_parts.MissingMicrobatch,
    )
}


def describe_faults() -> str:
    """List every fault, its keys, what it does, and what must show it, two lines each."""
    return "\n".join(
        f"  {name:<21} {','.join(fault.find_keys())}\n      {explain(fault)} (dtprof: {_name_sign(fault)})"
        for name, fault in FAULTS.items()
    )


def explain(fault: type[Fault]) -> str:
    """Return what it does, in a sentence."""
    return (fault.__doc__ or "").splitlines()[0]


def _name_sign(fault: type[Fault]) -> str:
    return fault.finding or f"{fault.figure} of the summary"


def parse_fault(text: str, *, world_size: int, pipeline_ranks: int, steps: int) -> Fault:
    """Read NAME[:key=value,...]; the rank is mostly the last one unless it is given."""
    name, _, settings = text.partition(":")
    if name not in FAULTS:
        raise UsageError(f"--fault {text}: unknown fault {name!r}; the faults are {', '.join(FAULTS)}")
    kind = FAULTS[name]
    values = {"rank": world_size - 1 if kind.default_rank is None else kind.default_rank}
    for setting in filter(None, settings.split(",")):
        key, _, value = setting.partition("=")
        if key not in kind.find_keys():
            raise UsageError(
                f"--fault {text}: unknown key {key!r}; the keys of {name} are {', '.join(kind.find_keys())}"
            )
        if not value.isdecimal():
            raise UsageError(f"--fault {text}: {key} is {value!r}; give a whole number, such as {key}=1")
        if len(value) > MAX_DIGITS:
            raise UsageError(f"--fault {text}: {key} is {value}; give a number of at most {MAX_DIGITS} digits")
        values[key] = int(value)
    fault = kind(**values)
    _refuse_unreachable(fault, text=text, world_size=world_size, pipeline_ranks=pipeline_ranks, steps=steps)
    return fault


def _refuse_unreachable(fault: Fault, *, text: str, world_size: int, pipeline_ranks: int, steps: int) -> None:
    """Refuse a fault that could not happen in this run, which would then look like a healthy one."""
    if fault.rank >= world_size:
        raise UsageError(f"--fault {text}: rank is {fault.rank}; this job has ranks 0 to {world_size - 1}")
    if world_size < fault.min_ranks:
        raise UsageError(f"--fault {text}: one rank waits for no other; start {fault.min_ranks} or more with torchrun")
    if fault.needs_pipeline and pipeline_ranks == 1:
        raise UsageError(f"--fault {text}: only a pipeline has stages; give --pp 2 or more too")
    for key in ("ms", "mb", "count", "seconds"):
        if getattr(fault, key, 1) == 0:
            raise UsageError(f"--fault {text}: {key} is 0, which is no fault; give a number from 1 on")
    # Others can wait for this rank only in what comes later.
    last_step = steps - 1 if fault.needs_later_step else steps
    step = getattr(fault, "step", 1)
    if not 1 <= step <= last_step:
        raise UsageError(f"--fault {text}: step is {step}; with --steps {steps} give step=1 to step={last_step}")
