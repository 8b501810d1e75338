"""The command line: one command a file; heavy imports inside the command."""
