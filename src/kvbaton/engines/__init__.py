"""Engine adapters: what connects an engine's scheduler and cache to a node."""
