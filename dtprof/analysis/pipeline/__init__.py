"""Bubbles of pipeline schedules: size, theory, causes, and the changes that would shrink them."""
