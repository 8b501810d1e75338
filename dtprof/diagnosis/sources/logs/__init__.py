"""What plain logs of a job tell: of jobs that ran without dtprof, too."""
