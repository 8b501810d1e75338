"""Start of dtprof in every Python process of a job: found first on PYTHONPATH, imports the standard library only.

Waits for the job to import torch, then arms the process; runs the sitecustomize that this one hides.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

BOOTSTRAP = os.path.dirname(os.path.abspath(__file__))
PACKAGE = os.path.dirname(os.path.dirname(BOOTSTRAP))


def import_dtprof():
    """Import the dtprof that started this job, also where it is not installed for this interpreter."""
    if "dtprof" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            "dtprof", os.path.join(PACKAGE, "__init__.py"), submodule_search_locations=[PACKAGE]
        )
        module = importlib.util.module_from_spec(spec)
        sys.modules["dtprof"] = module
        spec.loader.exec_module(module)


def arm():
    """Arm this process; whatever goes wrong is one line on stderr."""
    try:
        import_dtprof()
        from dtprof.capture import arm as armed

        armed.arm()
    except Exception as error:
        print(f"dtprof: disabled in process {os.getpid()}: {type(error).__name__}: {error}", file=sys.stderr)


class AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Arms the process right after torch has been imported, once."""

    def __init__(self):
        """Wait for the import."""
        self.original = None

    def find_spec(self, name, path=None, target=None):
        """Find torch as it would be found without this, and stand in for its loader."""
        if name != "torch" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            self.original = spec.loader
            spec.loader = self
        return spec

    def create_module(self, spec):
        """Let torch's own loader create the module."""
        return self.original.create_module(spec)

    def exec_module(self, module):
        """Let torch's own loader execute the module, give it back, and arm."""
        module.__spec__.loader = module.__loader__ = self.original
        self.original.exec_module(module)
        arm()


def run_hidden_sitecustomize():
    """Run the sitecustomize that would have been imported had this one not been first."""
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != BOOTSTRAP]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


if os.environ.get("DTPROF_RUN_DIR"):
    sys.meta_path.insert(0, AfterTorch())
run_hidden_sitecustomize()
