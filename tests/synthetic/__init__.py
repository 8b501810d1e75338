"""Runs of jobs that never were, of any size, with known truth: `generate` lets a job run and writes its records."""

from tests.synthetic.job import HostClock, Job, Spell, Truth, take_turns
from tests.synthetic.writing import generate

__all__ = ("HostClock", "Job", "Spell", "Truth", "generate", "take_turns")
