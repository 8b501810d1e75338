"""Executors other than the own process: worker processes of this host, and Dask. Each is used in a `with` block."""
