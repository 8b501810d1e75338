"""Layouts of a model on a cluster: which fit, and the predicted step time of each."""
