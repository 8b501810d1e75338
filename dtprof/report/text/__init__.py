"""Results as text of 80 columns, and as Markdown."""
