"""Requests of `dtprof trace --now` to a rank: a small file in its folder. Standard library only: ranks read it."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from dtprof import settings
from dtprof.records import paths, writer

TURN = "turn"
"""The request of a window that a rank takes in turn: no file asks for it."""


@dataclass(frozen=True, kw_only=True)
class TraceRequest:
    """A window over the next steps, or a snapshot of memory at the end of this one."""

    id: str
    steps: int = 0  # 0: no window
    memory: bool = False


def put(rank_folder: Path, request: TraceRequest) -> None:
    """Write the request into the folder of a rank.

    Raises:
        OSError: the file cannot be written.
    """
    writer.write_json(rank_folder / paths.TRACE_REQUEST, asdict(request))


def withdraw(rank_folder: Path) -> bool:
    """Withdraw the request; return False where the rank has taken it."""
    try:
        (rank_folder / paths.TRACE_REQUEST).unlink()
    except OSError:
        return False
    return True


def take(rank_folder: Path) -> TraceRequest | None:
    """Remove the request from the folder and return it; None for none.

    Raises:
        OSError, ValueError: it cannot be read, or is invalid.
    """
    file = rank_folder / paths.TRACE_REQUEST
    try:
        document = json.loads(file.read_bytes())
    except FileNotFoundError:
        return None
    finally:
        file.unlink(missing_ok=True)
    steps, name = document["steps"], document["id"]
    if type(steps) is not int or not 0 <= steps <= settings.MOST_TRACED_STEPS or not isinstance(name, str):
        raise ValueError(f"{paths.TRACE_REQUEST} holds no request")
    return TraceRequest(id=name[:64], steps=steps, memory=document.get("memory") is True)
