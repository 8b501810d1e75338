"""Results as JSON documents, schema 1."""
