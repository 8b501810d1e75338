"""The Python hook: the same records as the native one, for machines without a compiler."""
