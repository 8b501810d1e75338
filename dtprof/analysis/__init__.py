"""Pure functions from tables to results: no files, no torch, no drawing."""
