"""What differs between runs, or from thresholds, beyond the noise of their steps."""
