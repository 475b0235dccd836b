"""Hash codes, and orders of a sequence by them."""
