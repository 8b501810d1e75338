"""What dtprof costs, measured: every figure a ratio or a difference within one run, as median and spread."""
