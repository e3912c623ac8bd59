"""How a world is drawn from a seed, and what is done to it."""
