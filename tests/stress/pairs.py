"""Run each trial bare and recorded, and compare: what was issued with what is in the run, and both ends."""

import importlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dtprof.records import schema
from dtprof.records.reader import open_run
from dtprof.records.tables import RankTables
from tests.stress import disk
from tests.stress.journal import read_journal
from tests.stress.program import KINDS
from tests.stress.rank import journal_path

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 40.0
"""When a program hangs, on a machine without other work: times the load, because trials run at the lowest priority."""
HOOKS = {"native": [], "python": ["--no-native"]}
ATTEMPTS_A_TRIAL = 64
"""Attempts set aside for a trial: forked children that train claim the ones after the rank's own."""
RETRIES = 5
"""How often a bare program is run again to see whether it, too, ends as the recorded one did."""
AFRESH_EVERY = 10
DISK_MB = 256
OUR_LINE = re.compile(r"^dtprof: .*\n", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Ending:
    """How the program of a trial ended, and what its ranks printed."""

    statuses: tuple[int, ...]
    hung: bool
    seconds: float
    printed: tuple[str, ...]


@dataclass(kw_only=True)
class Tally:
    """What the trials of a kind came to."""

    trials: int = 0
    operations: int = 0
    lost: int = 0
    changed: int = 0
    hangs_bare: int = 0
    hangs_recorded: int = 0
    hangs_ours: int = 0
    aborts_bare: int = 0
    aborts_recorded: int = 0
    seconds_bare: float = 0.0
    seconds_recorded: float = 0.0
    findings: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        """Say whether dtprof did no harm and lost nothing."""
        return not (self.lost or self.changed or self.hangs_ours or self.findings)


class Host:
    """A process that runs trials, bare or recorded."""

    def __init__(self, command: Sequence[str], run: Path | None, errors: Path) -> None:
        """Start it."""
        self.run = run
        self._errors = errors.open("w")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            [*command, sys.executable, "-m", "tests.stress.host"],
            cwd=REPOSITORY,
            env={name: value for name, value in environment.items() if name not in ("RANK", "WORLD_SIZE")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            start_new_session=True,
        )

    def end(self, request: dict[str, Any]) -> Ending:
        """Run a trial to its end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the host ended: {Path(self._errors.name).read_text()}"
        told = json.loads(line)
        folder, ranks = Path(request["folder"]), range(request["plan"]["ranks"])
        printed = tuple((folder / f"out-{rank}").read_text() for rank in ranks)
        return Ending(statuses=tuple(told["statuses"]), hung=told["hung"], seconds=told["seconds"], printed=printed)

    def stop(self) -> None:
        """Let it end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        status = self._process.wait(TIMEOUT_S)
        self._errors.close()
        assert status == 0, Path(self._errors.name).read_text()


def recording(run: Path, hook: str) -> list[str]:
    """Return what stands before a command to have it recorded."""
    return [sys.executable, "-m", "dtprof", "run", "-o", str(run), "--hang-after", "0", *HOOKS[hook], "--"]


class Hosts:
    """The hosts of all trials, each started when it is first needed."""

    def __init__(self, folder: Path, small_disk: Path | None) -> None:
        """Start none yet."""
        self._folder = folder
        self.small_disk = small_disk
        self._hosts: dict[str, Host] = {}

    def bare(self) -> Host:
        """Return the host without dtprof."""
        return self._get("bare", [], None)

    def recorded(self, hook: str, *, small: bool) -> Host:
        """Return the host below dtprof, with its run on the small disk or not."""
        at = self.small_disk if small and self.small_disk is not None else self._folder
        run = at / f"run-{hook}{'-disk' if small else ''}"
        return self._get(run.name, recording(run, hook), run)

    def _get(self, name: str, command: Sequence[str], run: Path | None) -> Host:
        if name not in self._hosts:
            self._hosts[name] = Host(command, run, self._folder / f"{name}.err")
        return self._hosts[name]

    def stop(self) -> None:
        """End them all."""
        for host in self._hosts.values():
            host.stop()


@contextmanager
def small_disk(folder: Path) -> Iterator[Path | None]:
    """Give a file system of its own, where this user may mount one."""
    at = folder / "disk"
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "none", str(at)]
    if os.geteuid() != 0 or subprocess.run(mount, stderr=subprocess.DEVNULL).returncode != 0:
        yield None
        return
    try:
        yield at
    finally:
        subprocess.run(["umount", str(at)], check=True)


def run_trials(
    kinds: Sequence[str], num_trials: int, seed: int, *, first: int = 0, keep: Path | None = None, tell: Any = None
) -> dict[str, Tally]:
    """Run the trials from `first` to this many, the kinds in turn, or until Ctrl-C; return what each kind came to.

    What they wrote is kept in the folder `keep`, which is made.
    """
    tallies: dict[str, Tally] = defaultdict(Tally)
    with ExitStack() as stack:
        if keep is not None:
            keep.mkdir(parents=True)
        folder = keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dtprof-stress-")))
        hosts = Hosts(folder, stack.enter_context(small_disk(folder)))
        stack.callback(hosts.stop)
        with suppress(KeyboardInterrupt):
            for number in range(first, num_trials):
                kind = kinds[number % len(kinds)]
                trial = Trial(kind=kind, number=number, seed=seed, folder=folder / f"trial-{number}", hosts=hosts)
                trial.run(tallies[kind])
                if tell is not None:
                    tell(trial, tallies[kind])
    return dict(tallies)


class Trial:
    """One program, bare and recorded."""

    def __init__(self, *, kind: str, number: int, seed: int, folder: Path, hosts: Hosts) -> None:
        """Draw what the program does."""
        chance = random.Random(f"{seed} {kind} {number}")
        module: Any = importlib.import_module(f"tests.stress.{KINDS[kind]}")
        self.kind = kind
        self.number = number
        self.plan: dict[str, Any] = {"seed": chance.randrange(2**32), **module.plan(chance)}
        self.hook = chance.choice(sorted(HOOKS))
        self.afresh = kind not in ("kill", "disk") and self.plan["ranks"] == 1 and chance.randrange(AFRESH_EVERY) == 0
        self._small = self.plan.get("way") == "small-disk" and hosts.small_disk is not None
        self._hosts = hosts
        self._folder = folder
        self._run = folder / "run"

    def __str__(self) -> str:
        """Say what it does, so that it can be done again."""
        return f"{self.kind} {self.number} ({self.hook}{', afresh' if self.afresh else ''}): {json.dumps(self.plan)}"

    def run(self, tally: Tally) -> None:
        """Do it both ways and add up what came of it."""
        bare = self._bare(0)
        recorded = self._recorded()
        tally.trials += 1
        tally.seconds_bare += bare.seconds
        tally.seconds_recorded += recorded.seconds
        tally.hangs_bare += bare.hung
        tally.hangs_recorded += recorded.hung
        planned = self.plan.get("end") == "sigabrt"
        tally.aborts_bare += any(status in (-6, -11) for status in bare.statuses) and not planned
        tally.aborts_recorded += any(status in (-6, -11) for status in recorded.statuses) and not planned
        if self._differ(bare, recorded):
            again = [self._bare(1 + i) for i in range(RETRIES)]
            tally.hangs_ours += recorded.hung and not any(ending.hung for ending in [bare, *again])
            if all(self._differ(ending, recorded) for ending in [bare, *again]):
                tally.changed += not recorded.hung
                tally.findings.append(f"{self}: ended as {recorded}, bare as {bare}")
        self._compare_records(tally)

    @staticmethod
    def _differ(bare: Ending, recorded: Ending) -> bool:
        return (bare.statuses, bare.hung, bare.printed) != (recorded.statuses, recorded.hung, recorded.printed)

    def _request(self, folder: Path, attempt: int) -> dict[str, Any]:
        told = {"kind": self.kind, "plan": self.plan, "folder": str(folder), "attempt": attempt}
        return told | {"timeout_s": TIMEOUT_S * max(1.0, os.getloadavg()[0])}

    def _bare(self, repetition: int) -> Ending:
        folder = self._folder / f"bare-{repetition}"
        if self.afresh:
            return self._start([], folder)
        return self._hosts.bare().end(self._request(folder, 0))

    def _recorded(self) -> Ending:
        folder = self._folder / "recorded"
        if self.afresh:
            return self._start(recording(self._run, self.hook), folder)
        host = self._hosts.recorded(self.hook, small=self._small)
        if self._small and self._hosts.small_disk is not None:
            disk.resize(self._hosts.small_disk, self.plan["room_mb"])
        ending = host.end(self._request(folder, self._attempt))
        assert host.run is not None
        self._run = host.run
        return ending

    @property
    def _attempt(self) -> int:
        return 0 if self.afresh else self.number * ATTEMPTS_A_TRIAL

    def _start(self, before: Sequence[str], folder: Path) -> Ending:
        """Run the program in an interpreter of its own."""
        folder.mkdir(parents=True)
        request = self._request(folder, 0)
        (folder / "request.json").write_text(json.dumps(request))
        begun = time.monotonic()
        with (folder / "out-0").open("w") as out, (folder / "err-0").open("w") as errors:
            process = subprocess.Popen(
                [*before, sys.executable, "-m", "tests.stress.program", str(folder / "request.json")],
                cwd=REPOSITORY,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                start_new_session=True,
            )
            try:
                status, hung = process.wait(request["timeout_s"]), False
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                status, hung = process.wait(), True
        printed = ((folder / "out-0").read_text(),)
        return Ending(statuses=(status,), hung=hung, seconds=time.monotonic() - begun, printed=printed)

    def _compare_records(self, tally: Tally) -> None:
        for rank in range(self.plan["ranks"]):
            journal = read_journal(journal_path(self._folder / "recorded", rank))
            tally.operations += sum(issued for issued, _ in journal.values())
            run = open_run(self._run)
            attempts = [attempt for attempt, _ in run.folders.get(rank, ())]
            if self._attempt not in attempts:
                self._miss(tally, rank, journal)
                continue
            tables = run.load(rank, self._attempt)
            if not tables.num_events and self._cannot_begin:
                continue
            if tables.problems or tables.errors:
                tally.findings.append(f"{self}: rank {rank}: {tables.problems} errors={tables.errors}")
            if tables.truncated:
                self._compare_truncated(tally, tables)
            else:
                self._compare_whole(tally, rank, journal, count(tables))

    @property
    def _cannot_begin(self) -> bool:
        """Say whether not even the first segment fits on the disk."""
        return self.plan.get("full_from") == 0.0 or (self._small and self.plan["room_mb"] < 4.5)

    def _miss(self, tally: Tally, rank: int, journal: dict[tuple[str, str], tuple[int, int]]) -> None:
        """Count what was issued and not recorded at all: right only where no log could be made."""
        if not self._cannot_begin:
            tally.lost += sum(returned for _, returned in journal.values())
            tally.findings.append(f"{self}: rank {rank} left no record")

    def _compare_truncated(self, tally: Tally, tables: RankTables) -> None:
        """Find gaps: a log that ends early holds everything up to its end."""
        if self.kind != "disk":
            tally.findings.append(f"{self}: truncated")
        for group in np.unique(tables.operations["group"]):
            seq = tables.operations["seq"][tables.operations["group"] == group]
            tally.lost += int(seq.max()) + 1 - len(seq)
        if tables.num_events % schema.SEGMENT_CAPACITY:
            tally.findings.append(f"{self}: truncated after {tables.num_events} events, in the middle of a segment")

    def _compare_whole(
        self,
        tally: Tally,
        rank: int,
        journal: dict[tuple[str, str], tuple[int, int]],
        recorded: Counter[tuple[str, str]],
    ) -> None:
        for (group, operation), (issued, returned) in journal.items():
            found = recorded[group, operation]
            tally.lost += max(0, returned - found)
            if not returned <= found <= issued:
                tally.findings.append(
                    f"{self}: rank {rank}: {operation} of {group or 'no group'}: issued {issued}, returned {returned}, "
                    f"recorded {found}"
                )
        unknown = [name for name in recorded if name[0] and name not in journal]
        if unknown:
            tally.findings.append(f"{self}: rank {rank}: recorded and never issued: {unknown}")


def count(tables: RankTables) -> Counter[tuple[str, str]]:
    """Count what is recorded, kept or dropped, by group and operation; phases of the program's own have no group."""
    found: Counter[tuple[str, str]] = Counter()
    names = {number: group.name for number, group in tables.groups.items()}
    pairs, counts = np.unique(tables.operations[["group", "op"]], return_counts=True)
    for pair, events in zip(pairs, counts, strict=True):
        found[names[int(pair["group"])], tables.raw_ops[int(pair["op"])]] += int(events)
    for op, events in zip(*np.unique(tables.spans["op"], return_counts=True), strict=True):
        found["", tables.raw_ops[int(op)].rpartition(":")[2]] += int(events)
    for row in tables.dropped:
        name = tables.raw_ops[int(row["op"])]
        if row["kind"] in (schema.KIND["collective"], schema.KIND["p2p"]):
            found[names[int(row["group"])], name] += int(row["events"])
        elif row["kind"] == schema.KIND["span"]:
            found["", name.rpartition(":")[2]] += int(row["events"])
    return found
