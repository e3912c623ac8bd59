"""An engine's half of a handoff, for any engine: machines between its scheduler and its doorway."""
