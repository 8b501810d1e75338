"""Differences between runs, or from thresholds, beyond the noise of their steps."""
