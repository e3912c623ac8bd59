"""`kvbaton bench store`: stores as an engine sees them, and what a hit saves."""
