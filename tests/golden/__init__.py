"""Stored runs of format 1, dumps and logs, and what the commands of dtprof print of them."""
