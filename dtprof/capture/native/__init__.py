"""The native tap: its source, its build, its loading."""
