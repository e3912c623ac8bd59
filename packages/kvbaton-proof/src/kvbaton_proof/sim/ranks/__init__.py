"""The ranks of a simulated engine: their links to it, the lossy lines of those, and their stores."""
