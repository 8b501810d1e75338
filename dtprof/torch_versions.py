"""The versions of torch that dtprof supports and is tested with."""

import re

OLDEST = (2, 6)
NEWEST_TESTED = (2, 15)


def is_too_old(version: str) -> bool:
    """Say whether this torch is older than the oldest supported one; an unknown version is not."""
    return is_older_than(version, OLDEST)


def refusal(version: str) -> str:
    """Return why a job with a torch that is too old is not recorded, as the launcher and the ranks say it."""
    return f"torch {version} is older than {shown(OLDEST)}, the oldest supported: the job runs uninstrumented"


def is_untested(version: str) -> bool:
    """Say whether this torch is newer than the newest tested one, or of an unknown version."""
    known = _parse(version)
    return known is None or known > NEWEST_TESTED


def is_older_than(version: str, other: tuple[int, int]) -> bool:
    """Say whether this torch is older than another; one of an unknown version is not."""
    known = _parse(version)
    return known is not None and known < other


def _parse(version: str) -> tuple[int, int] | None:
    """Return major and minor version; development versions count as the release that they become."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def shown(version: tuple[int, int]) -> str:
    """Return a version as text."""
    return ".".join(map(str, version))
