"""Keys and values of prompts on their way between servers: one computes them, another goes on from them."""
