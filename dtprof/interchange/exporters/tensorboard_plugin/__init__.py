"""A TensorBoard plugin that shows the traces of torch-tb-profiler without network access."""
