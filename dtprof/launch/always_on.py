"""Runs of every torch job of a machine: whose folder they go to, for how long, and the switch that turns it off.

`dtprof inject install --site` makes the store, a folder that everybody may add to and nobody may empty (as /tmp is).
Each user's runs lie in a folder of their own in it. Nothing in the store that another user could have put there is
believed: a folder of a user is that user's alone, policy and switch are root's or one's own.
"""

import contextlib
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from dtprof import settings
from dtprof.errors import OutputError
from dtprof.records import writer

POLICY = "policy.json"
OFF = "off"
"""A file of this name in the store turns recording off for everybody."""
STORE_MODE = 0o1777
DEFAULT_POLICY: Mapping[str, float] = {
    "keep_days": 14.0,
    "keep_notable_days": 56.0,
    "max_mb_per_run": 0.0,
    "max_gb_per_day": 0.0,
    "max_gb_per_user": 50.0,
}


def make_store(store: Path, policy: Mapping[str, float]) -> None:
    """Make the folder for the runs of all users, and write how long they are kept.

    Raises:
        OutputError: it cannot be made, or is another user's.
    """
    try:
        store.mkdir(parents=True, exist_ok=True)
        status = store.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
            raise OutputError(f"{store} is a link, or another user's; expected a new folder, or one of your own")
        store.chmod(STORE_MODE if os.getuid() == 0 else 0o755)  # a store of one user is that user's alone
        writer.write_json(store / POLICY, {"schema": 1, **policy})
    except OSError as error:
        raise OutputError(f"{store} cannot be written to ({error.strerror}); give a folder with --store") from error


def runs_folder() -> Path:
    """Return the folder of runs: the user's own in the store where every job is recorded, else one beside the job.

    Raises:
        OutputError: the user's folder in the store is not the user's alone, or cannot be made.
    """
    store = os.environ.get(settings.ENV_ALWAYS, "")
    return user_folder(Path(store)) if store else Path(settings.RUNS)


def user_folder(store: Path) -> Path:
    """Return the folder of this user in a store; it is made where it is missing.

    Raises:
        OutputError: as for `runs_folder`.
    """
    from dtprof.records import run_facts  # each launch loads this module, and few have a store

    folder = store / run_facts.user_name(os.getuid()).replace(os.sep, "_")
    try:
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = folder.lstat()
    except OSError as error:
        raise OutputError(
            f"{folder} cannot be made ({error.strerror}); expected the store of `inject install`"
        ) from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OutputError(f"{folder} is a link, another user's, or others may write to it: nothing is put there")
    return folder


def read_policy(store: Path) -> dict[str, float]:
    """Return for how long runs are kept; the default where the file is missing, damaged, or of another user."""
    file = store / POLICY
    try:
        if file.lstat().st_uid not in (0, os.getuid()) or file.is_symlink():
            return dict(DEFAULT_POLICY)
        document = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return dict(DEFAULT_POLICY)
    given = document if isinstance(document, dict) else {}
    return {
        name: float(value)
        if isinstance(value := given.get(name), int | float) and not isinstance(value, bool) and value >= 0
        else default
        for name, default in DEFAULT_POLICY.items()
    }
