"""The job that the records of all ranks describe together: groups, clocks, and operations matched across ranks."""
