"""Coverage-guided fuzzing of the readers of files that others wrote: `python -m tests.fuzz TARGET --inputs N`."""
