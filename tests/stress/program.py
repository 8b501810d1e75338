"""The program of one rank of a trial.

python -m tests.stress.program REQUEST.json    a rank of its own, as the request says
"""

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tests.stress.rank import Rank

KINDS = {"kill": "kill", "disk": "disk", "fork": "fork", "threads": "threads", "exit": "exits"}
"""Kinds of trials, and the module of each."""


def run_rank(request: dict[str, Any], rank: int) -> None:
    """Do what the trial does on one rank; the caller lets the interpreter end."""
    plan = request["plan"]
    os.environ.update(plan.get("environment", {}))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(plan["ranks"]), LOCAL_RANK=str(rank))
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(request["attempt"])
    kind: Any = importlib.import_module(f"tests.stress.{KINDS[request['kind']]}")
    if hasattr(kind, "before"):
        kind.before(plan)
    kind.work(Rank(rank=rank, plan=plan, folder=Path(request["folder"])))


if __name__ == "__main__":
    run_rank(json.loads(Path(sys.argv[1]).read_text()), 0)
