"""Data planes: each moves byte spans between registered memory of two processes. The list of them is `catalogue`."""
