"""A running job: its newest steps as analysis reads a run, the activity of every rank, and the views on both."""
