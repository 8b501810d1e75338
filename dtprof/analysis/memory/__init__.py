"""Memory of ranks over the run and beside the formulas, and the load of the devices of a node."""
