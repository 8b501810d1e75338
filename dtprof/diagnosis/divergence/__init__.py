"""Where the programs of two ranks diverge: by the sequence of their calls, by their stacks and by the source."""
