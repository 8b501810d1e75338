"""What plain logs of a job tell: of jobs that ran without dtprof, too."""

from dtprof.diagnosis.logs.reading import diagnose_logs, files_of, looks_like_a_log

__all__ = ["diagnose_logs", "files_of", "looks_like_a_log"]
