"""Run programs of the corpus: `python -m tests.faults [--json] [--keep DIR] [--on DEVICE] [NAME...]`.

`--list KIND` runs none, and prints the programs that show a kind of fault (`sound`: none), with their files.

Without a name it runs all programs on the CPU, over gloo; with `--on sim` those of `device_programs.py` on the
simulated accelerator, with `--on cuda` on NCCL and one GPU, and with `--on both` on CPU and simulated accelerator, to
compare the verdicts. Exit status 1 where a verdict is wrong,
or differs.
"""

import argparse
import importlib
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dtprof.capture.native import build
from dtprof.diagnosis.rules import KINDS
from dtprof.records import paths, schema
from tests.accelerator.compiled_device import ensure_library
from tests.faults import forked_jobs, programs
from tests.faults.corpus import PROGRAMS, list_programs
from tests.faults.corpus import SOUND as NO_FAULT
from tests.faults.device_programs import FAULTY, ON_NCCL, SOUND
from tests.faults.forked_jobs import run

AT_ONCE = 3
DEVICES = ("cpu", "sim", "cuda")
LATE_IMPORTS = ("torch._dynamo", "torch.distributed.checkpoint", "torch.optim", "torch.utils.data")
"""What training imports after it has started."""


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--json", action="store_true", help="print {name: [mistake, ...]}")
    parser.add_argument("--keep", type=Path, help="keep runs and outputs in this directory")
    parser.add_argument("--hang-after", type=float, default=forked_jobs.HANG_AFTER_S)
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="programs run side by side")
    parser.add_argument("--no-native", action="store_true", help="record with the recorder in Python")
    parser.add_argument(
        "--on", choices=(*DEVICES, "both"), default="cpu", help="device of the programs' tensors; both: cpu and sim"
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="programs; default: all that are meant for the device")
    parser.add_argument(
        "--list", metavar="KIND", choices=(*KINDS, NO_FAULT), help="print the programs of a kind, or sound"
    )
    arguments = parser.parse_args()
    forked_jobs.HANG_AFTER_S = arguments.hang_after
    programs.load()
    if arguments.list:
        print("\n".join(list_programs(arguments.list)))
        return 0
    if unknown := [name for name in arguments.names if name not in PROGRAMS]:
        parser.error(f"no program is called {', '.join(unknown)}; tests/faults/programs holds them")
    devices = ("cpu", "sim") if arguments.on == "both" else (arguments.on,)
    for module in LATE_IMPORTS:
        importlib.import_module(module)  # once, for all ranks
    if "sim" in devices:
        ensure_library()
    if "cuda" in devices and torch.version.cuda is None:  # a process that forks must not ask for the devices
        parser.error(f"torch {torch.__version__} is built without CUDA; --on sim runs on the simulated accelerator")

    library = "" if arguments.no_native else build.ensure(schema.cpp_header(), timeout_s=300)["library"] or ""
    chosen = arguments.names or (list(PROGRAMS) if devices == ("cpu",) else [*FAULTY, *SOUND])
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="corpus-"))
    try:
        runs = [(name, device) for name in chosen for device in devices]
        results = run_all(runs, folder, library, at_once=arguments.at_once)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder)
    if len(devices) > 1:
        return compare({name: tuple(results[name, device] for device in devices) for name in chosen})
    found = {name: results[name, devices[0]] for name in chosen}
    if arguments.json:
        print(json.dumps({name: result.mistakes for name, result in found.items()}))
    else:
        for name, result in found.items():
            is_wrong = "WRONG" if result.mistakes else "right"
            print(f"{is_wrong} {name} ({result.took_s:.1f} s) {'; '.join(result.mistakes)}")
        print("\n".join(summary_lines({name: result.mistakes for name, result in found.items()})))
    return 1 if any(result.mistakes for result in found.values()) else 0


def compare(pairs: dict[str, tuple["Result", ...]]) -> int:
    """Print of each program what was said of it on the CPU and on the device; return 1 where that differs."""
    for name, (cpu, device) in pairs.items():
        words = "equal" if cpu.told == device.told else "OTHER"
        beside = "" if cpu.told == device.told else f" | {device.told}"
        wrong = f" (WRONG on the CPU: {'; '.join(cpu.mistakes)})" if cpu.mistakes else ""
        print(f"{words} {name}: {cpu.told}{beside}{wrong}")
    for title, kinds in (("programs with a fault", FAULTY), ("sound programs", SOUND)):
        chosen = [pair for name, pair in pairs.items() if name in kinds]
        print(f"{sum(cpu.told == device.told for cpu, device in chosen)} of {len(chosen)} {title}: equal verdicts")
    return 0 if all(cpu.told == device.told for cpu, device in pairs.values()) else 1


def summary_lines(results: dict[str, list[str]]) -> list[str]:
    """Return how often kind and culprits, and the line, are right, by kind and in all."""
    lines = ["| kind | programs | kind and culprits right | with a line | line right |", "|---|---|---|---|---|"]
    kinds = sorted({kind for name in results if (kind := PROGRAMS[name].kind) is not None})
    for kind in [*kinds, "all"]:
        chosen = [name for name in results if PROGRAMS[name].kind in ((kind,) if kind in kinds else kinds)]
        located = [name for name in chosen if PROGRAMS[name].lines]
        named = sum(all(mistake.startswith("lines") for mistake in results[name]) for name in chosen)
        at_line = sum(not results[name] for name in located)
        lines.append(f"| {kind} | {len(chosen)} | {named} | {len(located)} | {at_line} |")
    sound = [name for name in results if PROGRAMS[name].kind is None]
    lines.append(f"{sum(not results[name] for name in sound)} of {len(sound)} sound programs without a finding")
    return lines


@dataclass(frozen=True, kw_only=True)
class Result:
    """What came of one run of a program."""

    mistakes: list[str]
    told: str  # outcome, kind and culprits of the first finding, and which of the marked lines it names
    took_s: float


def run_all(runs: list[tuple[str, str]], folder: Path, library: str, *, at_once: int) -> dict[tuple[str, str], Result]:
    """Run programs, each on a device, a few at a time, each supervised by a process of its own."""
    results: dict[tuple[str, str], Result] = {}
    waiting, running = list(runs), {}
    while waiting or running:
        while waiting and len(running) < at_once:
            name, device = waiting.pop(0)
            running[supervise(name, device, folder, library)] = (name, device, time.monotonic())
        pid, _ = os.wait()
        name, device, begun_s = running.pop(pid)
        file = folder / f"{name}-{device}.json"
        failed = {"mistakes": ["the supervisor failed: see stderr"], "told": "nothing: the supervisor failed"}
        said = json.loads(file.read_text()) if file.exists() else failed
        results[name, device] = Result(**said, took_s=time.monotonic() - begun_s)
    return {key: results[key] for key in runs}


def supervise(name: str, device: str, folder: Path, library: str) -> int:
    """Run one program in a forked process, which leaves in a file what came of it."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    try:
        program = PROGRAMS[name]
        if device == "cuda" and name in ON_NCCL:
            program = replace(program, kind=ON_NCCL[name])
        kept = folder / f"{name}-{device}"
        verdict = run(program, kept, library=library, device=device)
        status = json.loads((kept / paths.MANIFEST).read_text())["exit_status"]
        said = {"mistakes": program.mistakes(verdict, exit_status=status), "told": program.told(verdict)}
        (folder / f"{name}-{device}.json").write_text(json.dumps(said))
    except BaseException as error:  # noqa: BLE001  # of a forked process: said, then it ends
        sys.excepthook(type(error), error, error.__traceback__)
    finally:
        os._exit(0)


sys.exit(main())
