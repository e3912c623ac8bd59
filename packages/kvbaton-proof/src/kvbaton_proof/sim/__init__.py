"""The simulator: the production ledger, node and doorway in clusters under faults, by seed."""
