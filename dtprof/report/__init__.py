"""Results as text, JSON and HTML: one output a file; nothing is computed here."""
