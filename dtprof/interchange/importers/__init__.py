"""Foreign formats, one a file, read into the tables that analysis and diagnosis work on."""
