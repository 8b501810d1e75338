"""Start the user's command with every rank instrumented, watch it, and pass everything through."""
