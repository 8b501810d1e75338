"""Pure functions from tables to results, by question: no files, no torch, no drawing."""
