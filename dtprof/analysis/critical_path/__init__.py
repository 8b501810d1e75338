"""The critical path: the work that must get faster for the step to get faster."""
