"""How a world is drawn from a seed, and the faults applied to it."""
