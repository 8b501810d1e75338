"""What a change would gain: the graph of a run, replayed with other durations."""
