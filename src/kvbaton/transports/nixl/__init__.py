"""nixl: READ and WRITE by NIXL, under kvbaton's life cycle."""
