"""Which ranks the others wait for, what that costs, and what mending them would gain."""
