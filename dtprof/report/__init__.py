"""Results as text, JSON, figures and HTML pages: one output a file; nothing is computed here."""
