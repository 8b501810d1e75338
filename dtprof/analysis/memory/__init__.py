"""What ranks hold in memory, over the run and beside the formulas, and what the devices of a node were doing."""
