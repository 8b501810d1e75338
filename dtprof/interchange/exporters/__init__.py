"""Runs in the formats of other tools, one format a file. Nothing here computes a figure; analysis does."""
