"""From tables, exits and stacks to one verdict: who, where, why, what to do. Rules in order, one family a file."""
