"""Bubbles of pipeline schedules: how large, beside theory, what they are made of, and what would change them."""
