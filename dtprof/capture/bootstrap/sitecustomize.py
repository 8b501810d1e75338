"""Found first on PYTHONPATH in every Python process of a job: starts dtprof, then runs the sitecustomize it hides.

Imports the standard library only.
"""

import importlib.machinery
import importlib.util
import os
import sys

BOOTSTRAP = os.path.dirname(os.path.abspath(__file__))


def start_dtprof():
    """Wait for torch, unless the `.pth` file has done so already."""
    if "dtprof_start" not in sys.modules:
        path = os.path.join(BOOTSTRAP, "dtprof_start.py")
        spec = importlib.util.spec_from_file_location("dtprof_start", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["dtprof_start"] = module
        spec.loader.exec_module(module)
        module.wait_for_torch()


def run_hidden_sitecustomize():
    """Run the sitecustomize that would have been imported had this one not been first."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != BOOTSTRAP]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


try:
    start_dtprof()
except Exception as error:
    print(f"dtprof: disabled in process {os.getpid()}: {type(error).__name__}: {error}", file=sys.stderr)
run_hidden_sitecustomize()
