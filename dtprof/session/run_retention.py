"""Which of many runs are kept: by a policy or by choice, and the removal of the others.

A run is removed only where it is the caller's own, no job writes it, and it holds nothing that dtprof did not write.
"""

import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtprof.errors import OutputError
from dtprof.launch import run_directory
from dtprof.records import run_facts
from dtprof.records.run_facts import RunFacts

NOTABLE = frozenset({"hang", "crash", "slow", run_facts.CUT_OFF})
"""Outcomes of runs that a policy keeps longer."""
DAY_NS = 86_400_000_000_000


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How long runs are kept; 0 sets no limit."""

    keep_days: float = 0.0
    keep_notable_days: float = 0.0  # hung, slow, crashed, cut off
    max_mb_per_run: float = 0.0  # of runs that are not notable
    max_gb_per_day: float = 0.0  # of each user's runs that started on one day (UTC); the newest stay
    max_gb_per_user: float = 0.0

    def surplus(self, runs: Sequence[RunFacts], *, now_ns: int) -> list[tuple[RunFacts, str]]:
        """Return the runs that go and why; where a user's space is short the oldest go, notable ones last."""
        going: dict[str, tuple[RunFacts, str]] = {}
        ended = [run for run in runs if run.outcome != run_facts.RUNNING]
        for run in ended:
            age_days = (now_ns - (run.ended_ns or run.started_ns)) / DAY_NS
            limit = self.keep_notable_days if run.outcome in NOTABLE else self.keep_days
            if limit and run.started_ns and age_days > limit:
                going[run.name] = (run, f"{age_days:.0f} days old, kept for {limit:g}")
            elif self.max_mb_per_run and run.outcome not in NOTABLE and run.nbytes > self.max_mb_per_run * 2**20:
                going[run.name] = (run, f"larger than {self.max_mb_per_run:g} MiB")
        if self.max_gb_per_day:
            self._limit(
                runs,
                going,
                by=lambda run: (run.user, run.started_ns // DAY_NS),
                most_gb=self.max_gb_per_day,
                words="of one day",
            )
        if self.max_gb_per_user:
            self._limit(runs, going, by=lambda run: run.user, most_gb=self.max_gb_per_user, words="")
        return list(going.values())

    @staticmethod
    def _limit(
        runs: Sequence[RunFacts],
        going: dict[str, tuple[RunFacts, str]],
        *,
        by: Callable[[RunFacts], Hashable],
        most_gb: float,
        words: str,
    ) -> None:
        """Add the runs that exceed the space of their kind, the oldest first, notable ones last."""
        kinds = defaultdict(list)
        for run in runs:
            if run.name not in going:
                kinds[by(run)].append(run)
        for kept in kinds.values():
            excess = sum(run.nbytes for run in kept) - most_gb * 2**30
            for run in sorted(kept, key=lambda run: (run.outcome in NOTABLE, run.started_ns)):
                if excess <= 0:
                    break
                if run.outcome != run_facts.RUNNING:
                    going[run.name] = (
                        run,
                        " ".join(filter(None, (f"{run.user} has more than {most_gb:g} GiB", words))),
                    )
                    excess -= run.nbytes


def remove_run(store: Path, facts: RunFacts) -> None:
    """Remove a run.

    Raises:
        OutputError: it runs, is another user's, is not what was listed, holds files of others, or cannot be removed.
    """
    run = store / facts.name
    if facts.outcome == run_facts.RUNNING:
        raise OutputError(f"{run} is still recorded; wait until its job has ended")
    try:
        status = run.lstat()
        if status.st_uid != os.getuid():
            owner = run_facts.user_name(status.st_uid)
            raise OutputError(f"{run} is a run of {owner}; only its owner removes it")
        if run.is_symlink() or run.parent.is_symlink():
            raise OutputError(f"{run} is a link; remove what it leads to by hand")
        run_directory.refuse_foreign_files(run)
        shutil.rmtree(run)
    except OSError as error:
        raise OutputError(f"{run} cannot be removed ({error.strerror})") from error
