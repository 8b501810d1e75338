"""Single steps and operations of ranks, for figures and exporters."""
