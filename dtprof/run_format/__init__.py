"""The run on disk: its schema, its writer and its reader."""
