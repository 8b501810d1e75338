"""What the records of all ranks say together: groups, clocks, and operations matched across ranks."""
