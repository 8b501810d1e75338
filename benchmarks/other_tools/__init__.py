"""What other tools say of the jobs that dtprof diagnoses."""
