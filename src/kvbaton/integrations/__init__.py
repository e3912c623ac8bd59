"""Adapters for systems that are not ours; each keeps the system's types to itself."""
