"""Whose code a recorded path is: of a host, and an installation, that need not be this one.

In a rank `capture/call_sites.py` knows the folders of its own interpreter, and records the user's lines only.
"""

import re

_NOT_USERS = re.compile(
    r"/(site|dist)-packages/|/lib(64)?/python\d|^<"
    # What of dtprof runs inside ranks, wherever it was checked out; the trainer beside it is a user's program.
    r"|/dtprof/(capture|records)/"
    r"|/dtprof/(auto|columns|errors|fence|formatting|integrations|interning|intervals|launchers|marks|settings)\.py$"
    r"|/dtprof/(text_enum|torch_versions|typed_quantities)\.py$"
    # Torch built from source lies in no folder of packages; a user's project may be called torch, too.
    r"|(^|/)torch/(_|autograd|csrc|distributed|fx|multiprocessing|nn|optim|utils)"
)


def is_user_file(path: str) -> bool:
    """Say whether a frame lies in the user's own code: Python, not torch, not dtprof, not installed."""
    return path.endswith(".py") and _NOT_USERS.search(path) is None
