"""Runs from and in the formats of other tools."""
