"""The native hook: its source, its build, its loading."""
