"""The metrics of a running job, node by node, kept up to date from the records of its ranks."""
