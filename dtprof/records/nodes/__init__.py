"""The files of a node: samples of host and GPUs, clock, memory, exits and stacks of its processes."""
