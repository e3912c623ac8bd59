"""Adapters for engines that are not ours; each keeps the engine's types to itself."""
