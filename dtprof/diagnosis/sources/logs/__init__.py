"""Plain logs of a job as a source, also of jobs that ran without dtprof."""
