"""The log of one rank: its segments and archives, its strings file, and the tables decoded from them."""
