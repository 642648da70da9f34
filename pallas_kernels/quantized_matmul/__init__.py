"""Products with weights of 4 bits in groups."""
