"""Everything that spreads a model written for one device over ranks, one kind of parallelism a file."""
