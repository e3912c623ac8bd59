"""Transports: each moves byte spans between registered memory of two processes. They are listed in `catalogue`."""
