"""The router's workers: which exist, their health, and which may be chosen now."""
