"""A running job: its newest steps as analysis sees a run, what every rank does now, and the views that show it."""
