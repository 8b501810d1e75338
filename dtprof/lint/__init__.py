"""From Python source, parsed and never run, to collectives that only some ranks issue. Standard library only."""
