"""The run on disk: its schema, its writer, its readers, and the tables that they give out."""
