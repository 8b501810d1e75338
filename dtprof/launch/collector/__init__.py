"""Runs of other hosts: launchers send the files of their part of a run, a collector keeps them as one run directory."""
