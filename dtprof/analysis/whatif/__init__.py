"""Predict the gain of a change: the graph of a run, replayed with other durations."""
