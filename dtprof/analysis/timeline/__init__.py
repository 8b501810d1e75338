"""Single steps and operations of ranks, for what draws or lists them one by one."""
