"""Profile and diagnose distributed PyTorch training.

A program needs none of the names here to be recorded; it may use them to mark its steps and phases.
"""

from dtprof.marks import phase, step

__all__ = ["phase", "step"]
__version__ = "0.1.0"
