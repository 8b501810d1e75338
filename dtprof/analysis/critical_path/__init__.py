"""What must get faster for the step to get faster."""
