"""The embedded engine's KV: its bytes, its blocks, and who has which."""
