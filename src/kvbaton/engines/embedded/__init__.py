"""The embedded engine: a small exact transformer on NumPy, with its own scheduler, cache and HTTP server."""
