"""Products of tokens with the weights of their experts."""
