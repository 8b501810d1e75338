"""Open a run, choose where its analysis runs, and collect results: what the commands and the Python API share."""
