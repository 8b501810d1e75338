"""The one error that this program raises on purpose."""


class UsageError(Exception):
    """Say which option, and what value of it, the user has to change."""
