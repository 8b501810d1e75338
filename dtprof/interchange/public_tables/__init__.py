"""The public tables of a run, as the Python API gives them and exports write them: records, windows, results."""
