"""An engine's node: the ledger, its ports, the doorway to the engine's thread, and the loop that steps it."""
