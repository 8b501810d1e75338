"""The pages of `dtprof report`, live in a browser while the job runs. Only ever reads."""
