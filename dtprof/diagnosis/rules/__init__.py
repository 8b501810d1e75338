"""What can be wrong with a job: one kind of finding a file."""
