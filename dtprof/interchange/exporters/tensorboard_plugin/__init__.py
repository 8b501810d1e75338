"""A TensorBoard plugin that shows what torch-tb-profiler reads without asking the network for anything."""
