"""Where steps begin and end, what they are made of, and how much they consume."""
