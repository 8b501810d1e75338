"""Cost of operations: durations, waits, exposed time, bandwidth, traffic."""
