"""Contracts that any transport, store or engine can run; public as `kvbaton.testing`."""
