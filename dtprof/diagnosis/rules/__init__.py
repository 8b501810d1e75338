"""What can be wrong with a job: one family of findings a file."""
