"""Index of the runs in a folder: facts of each in SQLite, read again only where a run has changed.

The index lies in the user's cache folder and not in the folder of runs: several users may share that, and none of them
may write what another one reads. Lost or damaged, it is made anew.
"""

import fnmatch
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dtprof.errors import NotARunError
from dtprof.records import paths, remote, run_facts
from dtprof.records.manifest import is_run
from dtprof.records.run_facts import RUNNING, RunFacts

VERSION = 1
"""Of the table; an index of another one is made anew."""
BUSY_S = 5.0
_COLUMNS = ("name", "stamp", "settled", "started_ns", "outcome", "user", "facts")
_TABLE = f"CREATE TABLE IF NOT EXISTS run ({', '.join(_COLUMNS)}, PRIMARY KEY (name)) WITHOUT ROWID"


@dataclass(frozen=True, kw_only=True)
class RunFilter:
    """Which runs are wanted; what is left empty chooses all."""

    since_ns: int = 0  # CLOCK_REALTIME at which the run started, at the earliest
    until_ns: int = 0  # and at the latest
    outcomes: Sequence[str] = ()
    user: str = ""
    host: str = ""  # pattern: *, ?, [...]
    name: str = ""  # pattern of the name of the run, or a word in its name or command
    limit: int | None = None  # at most so many, the newest

    def takes(self, facts: RunFacts) -> bool:
        """Say whether a run is wanted."""
        return (
            facts.started_ns >= self.since_ns
            and (not self.until_ns or facts.started_ns <= self.until_ns)
            and (not self.outcomes or facts.outcome in self.outcomes)
            and (not self.user or facts.user == self.user)
            and (not self.host or any(fnmatch.fnmatchcase(host, self.host) for host in facts.hosts))
            and (not self.name or self._is_named(facts))
        )

    def _is_named(self, facts: RunFacts) -> bool:
        names = (facts.name, Path(facts.name).name)
        return (
            self.name in facts.name
            or self.name in facts.command
            or any(fnmatch.fnmatchcase(name, self.name) for name in names)
        )


class RunIndex:
    """The runs of one folder."""

    def __init__(self, store: Path) -> None:
        """Open the index, or make one.

        Raises:
            NotARunError: there is no such folder.
        """
        if not store.is_dir():
            raise NotARunError(
                f"{store} is no folder; expected one that holds runs, as dtprof-runs does after "
                "`dtprof run -- COMMAND`: give it as dtprof runs FOLDER"
            )
        self.store = store.resolve()
        self._connection = _connect(self.store)

    def close(self) -> None:
        """Close the file."""
        self._connection.close()

    def runs(self, wanted: RunFilter) -> list[RunFacts]:
        """Bring the index up to date and return the wanted runs, the newest first.

        Raises:
            NotARunError: the folder cannot be read.
        """
        facts = [_facts(row) for row in self._current()]
        chosen = [fact for fact in facts if wanted.takes(fact)]
        return sorted(chosen, key=lambda run: (-run.started_ns, run.name))[: wanted.limit]

    def put_step(self, facts: RunFacts, step_ns: float | None) -> RunFacts:
        """Keep the measured duration of a step of a run; return its facts with that."""
        facts = replace(facts, step_ns=step_ns)
        with self._connection:
            self._connection.execute("UPDATE run SET facts=? WHERE name=?", (json.dumps(asdict(facts)), facts.name))
        return facts

    def _current(self) -> list[str]:
        known = {
            name: (stamp, settled, facts)
            for name, stamp, settled, facts in self._connection.execute("SELECT name, stamp, settled, facts FROM run")
        }
        rows, changed = [], []
        found: set[str] = set()
        for path, name in self._find():
            found.add(name)
            stamp = _stamp(path)
            entry = known.get(name)
            if entry is not None and entry[0] == stamp and entry[1]:
                rows.append(entry[2])
                continue
            try:
                facts, settled = _read(Path(path), name)
            except OSError:  # removed meanwhile, or of another user who lets nobody in
                continue
            text = json.dumps(asdict(facts))
            rows.append(text)
            changed.append((name, stamp, settled, facts.started_ns, facts.outcome, facts.user, text))
        gone = [(name,) for name in known.keys() - found]
        if changed or gone:
            with self._connection:
                marks = ", ".join("?" * len(_COLUMNS))
                self._connection.executemany(f"INSERT OR REPLACE INTO run VALUES ({marks})", changed)
                self._connection.executemany("DELETE FROM run WHERE name=?", gone)
        return rows

    def _find(self) -> Iterator[tuple[str, str]]:
        """Yield path and name of every run in the folder, and in folders of users one below."""
        try:
            entries = _folders(str(self.store))
        except OSError as error:
            raise NotARunError(
                f"{self.store} cannot be read ({error.strerror}); expected a folder of runs that you may read"
            ) from error
        if (self.store / paths.MANIFEST).exists():
            raise NotARunError(
                f"{self.store} is a run itself; expected the folder that holds runs: dtprof runs {self.store.parent}"
            )
        for path, name in entries:
            if is_run(Path(path)):
                yield path, name
                continue
            try:
                below = _folders(path)
            except OSError:  # of another user
                continue
            for inner, inner_name in below:
                if is_run(Path(inner)):
                    yield inner, f"{name}/{inner_name}"


def _folders(path: str) -> list[tuple[str, str]]:
    with os.scandir(path) as entries:
        return [
            (entry.path, entry.name)
            for entry in entries
            if not entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        ]


def _stamp(path: str) -> str:
    """Return a text that changes with the manifest and the verdict of a run."""
    stamps = []
    for name in (paths.MANIFEST, paths.VERDICT):
        try:
            status = Path(path, name).lstat()
        except OSError:
            stamps.append("-")
        else:
            stamps.append(f"{status.st_mtime_ns}.{status.st_size}.{status.st_ino}")
    return " ".join(stamps)


def _read(path: Path, name: str) -> tuple[RunFacts, bool]:
    """Return the facts of a run, and whether they stay as they are until its manifest changes."""
    is_alive, is_sure = run_facts.find_launcher(path)
    facts = run_facts.read_facts(path, name, is_alive=is_alive)
    return facts, facts.outcome != RUNNING and (is_sure or bool(facts.ended_ns))


def _facts(text: str) -> RunFacts:
    document = json.loads(text)
    return RunFacts(**{**document, "hosts": tuple(document["hosts"])})


def _connect(store: Path) -> sqlite3.Connection:
    """Open the index of a folder; one in memory where the cache cannot be used."""
    digest = hashlib.sha256(os.fsencode(store)).hexdigest()[:16]
    file = remote.cache_folder().with_name("run-index") / f"{digest}.{VERSION}.sqlite"
    for _ in range(2):
        try:
            file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            connection = sqlite3.connect(file, timeout=BUSY_S)
            connection.execute(_TABLE)
            connection.execute("SELECT * FROM run LIMIT 1").fetchone()
        except sqlite3.OperationalError:
            break  # locked, or no place for it
        except (sqlite3.DatabaseError, OSError):
            try:
                file.unlink(missing_ok=True)  # damaged
            except OSError:
                break
        else:
            return connection
    connection = sqlite3.connect(":memory:")
    connection.execute(_TABLE)
    return connection
