"""Which layouts of a model fit a cluster, and what a step of each would take."""
