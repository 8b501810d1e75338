"""Stragglers: the ranks that others wait for, their cost, and the gain from mending them."""
