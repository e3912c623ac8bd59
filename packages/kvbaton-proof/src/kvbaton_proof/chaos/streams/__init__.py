"""Long streams of every kind, cut by faults: what one engine answers, what the client was told, and the verdict."""
