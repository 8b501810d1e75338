"""What operations cost: durations, waits, exposed time, bandwidth, traffic."""
