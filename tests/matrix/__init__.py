"""Pairs of a Python and a torch, each with an environment of its own."""
