"""A run that goes on: its newest steps as analysis sees a run, and what every rank does now."""
