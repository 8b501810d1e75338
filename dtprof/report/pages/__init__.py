"""The panels of HTML pages, and the file that holds them."""
