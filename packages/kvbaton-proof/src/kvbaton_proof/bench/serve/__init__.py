"""`kvbaton bench serve`: what clients of a cluster see under load."""
