"""Which workers there are, how they fare, and which of them may be asked now."""
